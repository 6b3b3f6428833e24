"""Stores the sample lengths of a dataset in a file, so that later runs need not compute them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.data.files.indexed_files import replacement_of
from shardwise.errors import DataError

PROBES = 16
"""Number of samples whose lengths are read and compared with the file."""


class LengthCache:
    """A JSON file with the lengths of all samples, and a fingerprint of the dataset.

    The fingerprint consists of the dataset's type and length, a Hugging Face dataset's own
    fingerprint, the code of the user's length function, and its results for a few samples. A change
    that affects none of these is not detected.
    """

    def __init__(self, file: str | Path, dataset: Any, length: Callable[[Any], Any]) -> None:
        self.file = Path(file)
        self._dataset, self._length = dataset, length

    def load(self) -> list[int] | None:
        """Return the lengths, or None if the file is missing or belongs to a different dataset.

        Raises:
            DataError: If the file does not contain lengths.
        """
        try:
            saved = json.loads(self.file.read_text())
            fingerprint, lengths = saved["fingerprint"], saved["lengths"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.file} is not a file of lengths ({type(error).__name__}): delete it, or "
                "pass another length_cache."
            ) from error
        if fingerprint != self._fingerprint() or len(lengths) != len(self._dataset):
            return None
        return list(lengths)

    def save(self, lengths: list[int]) -> None:
        """Write the lengths. Raises DataError if the file cannot be written."""
        content = json.dumps({"fingerprint": self._fingerprint(), "lengths": lengths})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Another run may read the file at the same time.
            with replacement_of(self.file) as file:
                file.write(content.encode())
        except OSError as error:
            raise DataError(
                f"length_cache={str(self.file)!r} cannot be written: {error.strerror or error}. "
                "Name a file in a folder that exists or can be created."
            ) from error

    def _fingerprint(self) -> str:
        dataset, count = self._dataset, len(self._dataset)
        code = getattr(self._length, "__code__", None)
        parts: list[Any] = [type(dataset).__qualname__, count]
        parts.append(getattr(dataset, "_fingerprint", None))
        parts.append(type(self._length).__qualname__ if code is None else code.co_code.hex())
        parts.append(None if code is None else code.co_names)
        probes = sorted({number * (count - 1) // (PROBES - 1) for number in range(PROBES)})
        parts.append([int(self._length(dataset[index])) for index in probes])
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
