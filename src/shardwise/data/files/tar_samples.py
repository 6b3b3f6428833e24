"""`sw.TarSamples`: tar files in WebDataset's layout."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.files.indexed_files import IndexedFiles, Spans
from shardwise.errors import DataError


class TarSamples(IndexedFiles):
    """A map-style dataset of tar files in WebDataset's layout.

    Consecutive files in a tar file form one sample if their names are the same up to the first dot:

        cat/17.jpg  cat/17.json  cat/18.jpg  cat/18.json      two samples with two fields

    A sample is a dict, such as `{"__key__": "cat/17", "jpg": b"...", "json": b"..."}`. It holds the
    common part of the names as "__key__" and maps the rest of each name, in lower case, to the
    file's bytes. Decode the fields in `transform`. The tar files must be local and uncompressed.

    Args:
        files: A path, a pattern such as `data-{000..146}.tar`, or a list of these. The files that
            match a pattern are sorted by name.
        index: Folder in which each sample's position is stored for later runs. Without it, every
            rank scans all files at each start.
        transform: Function that converts a sample. The Loader seeds its random numbers by (seed,
            epoch, index).

    Raises:
        DataError: If a file is missing, empty, compressed or malformed.

    Example:
        ```python
        def decode(sample):
            image = PIL.Image.open(io.BytesIO(sample["jpg"]))
            return to_tensor(image), int(sample["cls"])


        dataset = sw.TarSamples("data/train-{000..146}.tar", index="index", transform=decode)
        loader = sw.Loader(dataset, batch_size=256, shuffle=True, num_workers=4)
        ```
    """

    def scan(self, file: BinaryIO, path: Path) -> Spans:
        """Return the byte ranges of the samples in `file`. Raises DataError if it is malformed."""
        spans: list[list[int]] = []
        keys: set[str] = set()
        latest: str | None = None
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it keeps all files
                    if (named := _split_name(member)) is None:
                        continue
                    key, _ = named
                    if key != latest:
                        if key in keys:
                            raise DataError(
                                f"The files of sample {key} in {path} are not next to each other: "
                                "write the tar with `tar --sort=name`."
                            )
                        keys.add(key)
                        latest = key
                        spans.append([member.offset, 0])
                    # The offset is now that of the next header.
                    spans[-1][1] = tar.offset
                end = tar.offset
        except tarfile.TarError as error:
            raise DataError(f"{path} is not a complete tar file: {error}.") from error
        # tarfile also stops at a damaged header. A complete file continues with zeros or ends.
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise DataError(f"{path} is not a complete tar file: byte {end} begins no header.")
        return np.array(spans, np.int64).reshape(-1, 2)

    def parse(self, content: bytes, place: str) -> dict[str, Any]:
        """Return the fields of the sample in `content`. Raises DataError if a name repeats."""
        sample: dict[str, Any] = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                if (named := _split_name(member)) is None:
                    continue
                sample["__key__"], field = named
                if field in sample:
                    raise DataError(f"{place}, has two fields {field}: rename one of the files.")
                file = tar.extractfile(member)
                assert file is not None  # `_split_name` accepts regular files only
                sample[field] = file.read()
        return sample


def _split_name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key and the field name of a file, or None if it is not part of a sample."""
    if not member.isreg():
        return None
    found = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
    if found is None or re.fullmatch(r"__.*__", member.name):
        return None
    return found[1], found[2].lower()
