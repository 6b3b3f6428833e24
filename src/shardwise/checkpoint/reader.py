"""Reads ranges of tensor elements from files, so that each rank reads only its own part."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_system import open_to_read, read_whole
from shardwise.checkpoint.format import (
    PlacedTensor,
    TensorFile,
    TensorSpec,
    dtype_of,
    header_length,
    parse,
)
from shardwise.checkpoint.schema import is_plain_name
from shardwise.errors import BrokenCheckpoint

_CHUNK = 2**20
"""Number of elements per read when computing a checksum."""


class TensorReader(ABC):
    """Reads tensors by name.

    Attributes:
        specs: Dtype and shape of every tensor, by name.
    """

    specs: Mapping[str, TensorSpec]

    @abstractmethod
    def read(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` with elements of tensor `name`, starting at element `first`.

        Raises BrokenCheckpoint if the file is too short.

        Args:
            into: A 1-D CPU tensor. Elements are converted to its dtype.
        """

    def whole(self, name: str) -> Tensor:
        """Return the full tensor `name`, with its saved shape and dtype."""
        spec = self.specs[name]
        value = torch.empty(spec.numel, dtype=dtype_of(spec.dtype))
        self.read(name, 0, value)
        return value.view(spec.shape)

    def checksum(self, name: str) -> str:
        """Return the CRC-32 of tensor `name`'s bytes, as 8 hexadecimal digits."""
        spec, crc = self.specs[name], 0
        dtype = dtype_of(spec.dtype)
        for first in range(0, spec.numel, _CHUNK):
            value = torch.empty(min(_CHUNK, spec.numel - first), dtype=dtype)
            self.read(name, first, value)
            crc = zlib.crc32(value.view(torch.uint8).numpy().data, crc)
        return f"{crc:08x}"

    def close(self) -> None:  # noqa: B027 (optional: some readers have no open files)
        """Close the files."""


class SafetensorsReader(TensorReader):
    """Reads the tensors in one or more safetensors files.

    Args:
        headers: Expected CRC-32 of each file's header, by file name. Files that it does not list
            are not checked.
    """

    def __init__(self, paths: Iterable[Path], headers: Mapping[str, str] | None = None) -> None:
        self._headers = headers or {}
        self.files: list[TensorFile] = []
        self._fds: dict[str, int] = {}
        self._paths: dict[str, Path] = {}
        self._placed: dict[str, PlacedTensor] = {}
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self.specs = {name: placed.spec for name, placed in self._placed.items()}

    def _open(self, path: Path) -> None:
        try:
            fd = open_to_read(path)
        except OSError as error:
            raise BrokenCheckpoint(
                f"{path} is part of this checkpoint but cannot be read ({error.strerror}). Restore "
                "the file, or use another checkpoint."
            ) from error
        self._fds[path.name], self._paths[path.name] = fd, path
        nbytes = os.fstat(fd).st_size
        # Check that the header's length fits the file size before reading that many bytes.
        length = header_length(os.pread(fd, 8, 0), nbytes, str(path))
        header = os.pread(fd, 8 + length, 0)
        written = self._headers.get(path.name)
        if written is not None and f"{zlib.crc32(header):08x}" != written:
            raise BrokenCheckpoint(
                f"The header of {path} was changed after it was written: its CRC-32 is not "
                f"{written}. Use another checkpoint."
            )
        file = parse(header, nbytes, str(path))
        for name, placed in file.tensors.items():
            # If two files contain the same tensor, there is no way to tell which one is right.
            if name in self._placed:
                raise BrokenCheckpoint(
                    f"{path} and {self._placed[name].file} both contain {name!r}. Use another "
                    "checkpoint."
                )
            self._placed[name] = PlacedTensor(placed.spec, path.name, placed.begin, placed.end)
        self.files.append(file)

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains tensor `name`."""
        return self._placed[name].file

    @property
    def metadata(self) -> dict[str, str]:
        """The merged metadata from the headers of all files."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def read(self, name: str, first: int, into: Tensor) -> None:
        placed = self._placed[name]
        dtype = dtype_of(placed.spec.dtype)
        assert first + into.numel() <= placed.spec.numel, "the range is within the tensor"
        target = into if into.dtype == dtype and into.is_contiguous() else None
        # Read directly into `into` if possible, otherwise through a buffer in the file's dtype.
        value = torch.empty(into.numel(), dtype=dtype) if target is None else target
        data = value.detach().view(torch.uint8).numpy().data if value.numel() else memoryview(b"")
        self._fill(placed, first * dtype.itemsize, data)
        if target is None:
            into.copy_(value)

    def _fill(self, placed: PlacedTensor, at: int, data: memoryview) -> None:
        offset = placed.begin + at
        while data:
            # preadv does not use the file position, so threads may read the same file concurrently.
            count = os.preadv(self._fds[placed.file], [data], offset)
            if count == 0:
                raise BrokenCheckpoint(
                    f"{self._paths[placed.file]} ends at byte {offset}, inside "
                    f"{placed.spec.name!r}: it was truncated while it was read. Load it again once "
                    "nothing writes to it."
                )
            data, offset = data[count:], offset + count

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


# -- finding the files ----------------------------------------------------------------------


def open_set(
    folder: Path, names: Iterable[Any], headers: Mapping[str, str] | None = None
) -> SafetensorsReader:
    """Open a tensor set of the checkpoint in `folder`.

    Args:
        names: Names of the set's files.
        headers: Expected CRC-32 of each file's header, as for `SafetensorsReader`.
    """
    return SafetensorsReader([folder / _check_file_name(folder, name) for name in names], headers)


def files_of(folder: Path, stem: str, suffix: str) -> list[Path] | None:
    """Return the files of the set `stem` in `folder`, or None if there are none.

    If the set has an index, the file names are read from it.
    """
    index = folder / f"{stem}{suffix}.index.json"
    if os.path.lexists(index):
        return [folder / name for name in _read_index(index)]
    whole = folder / f"{stem}{suffix}"
    return [whole] if os.path.lexists(whole) else None


def _read_index(path: Path) -> list[str]:
    """Return the file names in an index. Raises BrokenCheckpoint if the index is invalid."""
    try:
        table = json.loads(read_whole(path))["weight_map"]
        names = sorted(set(table.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(
            f"{path} is not the index of a split model: it has no weight_map of file names."
        ) from error
    return [_check_file_name(path, name) for name in names]


def _check_file_name(path: Path, name: Any) -> str:
    """Return `name`. Raises BrokenCheckpoint if it could refer to a file in another folder."""
    if not is_plain_name(name):
        raise BrokenCheckpoint(
            f"{path} names the file {name!r}, which is not a file in the same folder."
        )
    return str(name)
