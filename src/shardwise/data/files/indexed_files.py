"""A map-style dataset of samples in files, with an index of the samples' byte ranges."""

from __future__ import annotations

import bisect
import fcntl
import glob
import hashlib
import os
import re
import sys
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shardwise.errors import DataError
from shardwise.world import world

Spans = NDArray[np.int64]
"""First byte of each sample and the byte after its last, of shape (samples, 2)."""

MOST_OPEN = 64
"""Maximum number of files that a process keeps open."""
REPORT_SECONDS = 5.0
"""Seconds between two reports of the number of files that have been read."""
COMPRESSED = {
    b"\x1f\x8b": "gzip -d",
    b"BZh": "bzip2 -d",
    b"\xfd7zXZ": "xz -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
}
"""First bytes of compressed files, and the command that decompresses them."""


class FileDataset(Dataset[Any]):
    """The samples of several files, one file after the other.

    A subclass sets `counts` to the number of samples in each file, and defines `read`.
    """

    def __init__(
        self, files: str | Path | Iterable[str | Path], transform: Callable[[Any], Any] | None
    ) -> None:
        self.paths = find_files(files)
        self.transform = transform
        stats = [path.stat() for path in self.paths]
        self.stamps = [(each.st_size, each.st_mtime_ns) for each in stats]
        self.counts: list[int] = []

    @abstractmethod
    def read(self, number: int, row: int) -> Any:
        """Return sample `row` of file `number`."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts))

    @property
    def contents(self) -> list[tuple[str, int, int]]:
        """Name, size in bytes and number of samples of each file, for comparison across ranks."""
        return [
            (path.name, size, count)
            for path, (size, _), count in zip(self.paths, self.stamps, self.counts, strict=True)
        ]

    @property
    def _fingerprint(self) -> str:
        """Text that changes if a file changes, for the Loader's `length_cache`."""
        content = repr([*zip(map(str, self.paths), self.stamps, strict=True)])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        sample = self.read(number, index - self._ends[number] + self.counts[number])
        return sample if self.transform is None else self.transform(sample)

    def _with_reports(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yield each file's path and stamp. On the main rank, report long waits."""
        reported = time.monotonic()
        for number, (path, stamp) in enumerate(zip(self.paths, self.stamps, strict=True)):
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                if not world.has_joined() or world.current().is_main:
                    count = f"{number:,} of {len(self.paths):,} files"
                    print(f"shardwise: reading {count}", file=sys.stderr, flush=True)
            yield path, stamp

    def _name(self, path: Path, *options: str) -> str:
        """Return the name of the file that stores the results of reading `path`."""
        key = " ".join([type(self).__name__, str(path.absolute()), *options])
        return f"{path.name}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


class IndexedFiles(FileDataset):
    """Files in which a sample is a range of bytes.

    A subclass defines `scan`, which finds the samples of a file, and `parse`, which decodes a
    sample. A file's index is rebuilt if the file's size or modification time has changed.
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        *,
        index: str | Path | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(files, transform)
        folder = None if index is None else Path(index)
        self._spans = [self._load(path, stamp, folder) for path, stamp in self._with_reports()]
        self.counts = list(map(len, self._spans))
        self._files: OrderedDict[int, _File] = OrderedDict()

    @abstractmethod
    def scan(self, file: BinaryIO, path: Path) -> Spans:
        """Return the byte ranges of the samples in `file`. Raises DataError if it is malformed."""

    @abstractmethod
    def parse(self, content: bytes, place: str) -> Any:
        """Decode the sample in `content`. Raises DataError, naming `place`, if it is malformed."""

    def read(self, number: int, row: int) -> Any:
        """Return sample `row` of file `number`."""
        first, end = map(int, self._spans[number][row])
        place = f"sample {row} of {self.paths[number]}, at byte {first}"
        return self.parse(self._open(number).read(first, end), place)

    def __getstate__(self) -> dict[str, Any]:
        # Open files cannot be sent to spawned DataLoader workers.
        return self.__dict__ | {"_files": OrderedDict()}

    def _open(self, number: int) -> _File:
        file = self._files.pop(number, None)
        if file is None:
            file = _File(self.paths[number], self.stamps[number])
            if len(self._files) >= MOST_OPEN:
                self._files.popitem(last=False)
        self._files[number] = file
        return file

    def _load(self, path: Path, stamp: tuple[int, int], folder: Path | None) -> Spans:
        """Return the samples' byte ranges, from the index if it is up to date."""
        if folder is None:
            return self._scanned(path)
        kept = folder / f"{self._name(path)}.npy"
        with locked(folder, "index"):
            spans = _read_index(kept, stamp)
            if spans is None:
                spans = self._scanned(path)
                rows = np.concatenate([np.array([stamp], np.int64), spans])
                with replacement_of(kept) as target:
                    np.save(target, rows)
        return spans

    def _scanned(self, path: Path) -> Spans:
        with path.open("rb") as file:
            _check_plain(file, path)
            spans = self.scan(file, path)
        if not len(spans):
            raise DataError(f"{path} has no samples: leave it out.")
        return spans


class _File:
    """An open file, which is closed when the last reference to it is dropped."""

    def __init__(self, path: Path, stamp: tuple[int, int]) -> None:
        self._path = path
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        stat = os.fstat(self._descriptor)
        if (stat.st_size, stat.st_mtime_ns) != stamp:
            raise DataError(
                f"{path} has changed since it was indexed, so its samples may have moved: start "
                "the run again, and do not write to the files of a running training."
            )

    def read(self, first: int, end: int) -> bytes:
        """Return bytes [first, end)."""
        # pread has no position, so forked workers can share the descriptor.
        content = b""
        while missing := end - first - len(content):
            # Linux reads at most 2 GiB at once.
            part = os.pread(self._descriptor, missing, first + len(content))
            if not part:
                raise DataError(
                    f"{self._path} ends before byte {end}: it was cut off after it was indexed."
                )
            content += part
        return content

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def find_files(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the paths that `files` names. Raises DataError if no file matches."""
    named = [files] if isinstance(files, str | Path) else list(files)
    paths: list[Path] = []
    for name in map(str, named):
        if "://" in name:
            raise DataError(f"{name} is not a local file: download it, or mount its storage.")
        for pattern in _expand(name):
            is_pattern = glob.has_magic(pattern) and not os.path.exists(pattern)
            found = sorted(glob.glob(pattern)) if is_pattern else [pattern]
            if not found:
                raise DataError(f"No file matches {pattern}: check the folder and the pattern.")
            paths += map(Path, found)
    for path in paths:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {problem}: name files, for example data/*.jsonl.")
    if not paths:
        raise DataError("The list of files is empty: name at least one file.")
    return paths


def _expand(name: str) -> list[str]:
    """Expand a range such as `{000..146}` in `name`, and return the resulting names."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", name)
    if found is None:
        return [name]
    first, last = found.groups()
    numbers = [str(each).zfill(len(first)) for each in range(int(first), int(last) + 1)]
    before, after = name[: found.start()], name[found.end() :]
    return [each for number in numbers for each in _expand(f"{before}{number}{after}")]


def _check_plain(file: BinaryIO, path: Path) -> None:
    head = file.read(6)
    file.seek(0)
    for magic, command in COMPRESSED.items():
        if head.startswith(magic):
            raise DataError(
                f"{path} is compressed, so its samples cannot be read in any order: run "
                f"`{command} {path}`."
            )


def _read_index(file: Path, stamp: tuple[int, int]) -> Spans | None:
    """Return the byte ranges in `file`, or None if it is missing, damaged or out of date."""
    try:
        rows: Spans = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_index = rows.dtype == np.int64 and rows.ndim == 2 and rows.shape[1:] == (2,) and len(rows)
    return rows[1:] if is_index and tuple(rows[0].tolist()) == stamp else None


@contextmanager
def locked(folder: Path, argument: str) -> Iterator[None]:
    """Create `folder`, and let one process at a time run the block.

    The first rank on each file system reads a data file. The other ranks wait, and then use that
    result. Raises DataError, naming the user's `argument`, if the block cannot write to the
    folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            # A file system without locks only makes every rank read the file.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(
            f"{argument}={str(folder)!r} cannot be used: {error.strerror or error}. Name a folder "
            "that exists or can be created, on a disk with free space."
        ) from error


@contextmanager
def replacement_of(file: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `file` at the end, so `file` is never incomplete."""
    part = file.with_name(f"{file.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with part.open("wb") as target:
            yield target
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
