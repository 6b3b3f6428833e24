"""The file that all ranks of a host write: valid JSON at every moment, even after a kill -9.

    | header |,{...},{...}     |,{...}           |                 |                 |]
      page 0   rank 1's, full    rank 0's          free: spaces      free: spaces      end

Free pages are spaces, which JSON allows, in front of the end of the array. A rank with events
overwrites free pages: one write for each page, which Linux does not interrupt, so that the file is
valid before it and after it. When no page is free, or all ranks have left and free pages are cut
off, the file is written anew beside and renamed. A lock keeps ranks from doing so at once; the
kernel releases it when a process dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAGE = 4096
END = b"]\n"
ROOM = 64
"""The least number of pages that are added when too few are free."""

LARGEST = 1 << 30
"""The size in bytes at which a file is full; viewers open no larger ones."""

NAME = "shardwise timeline"


class NoTimeline(OSError):
    """Raised for a file that exists and was not written by a run of ours."""


class TimelineFile:
    """The file `path` of the run named `run`, joined by rank `rank`.

    What an earlier run left there is replaced. `about` is what its header says besides. Raises
    OSError where no file can be written, NoTimeline where another one would be lost.
    """

    def __init__(self, path: Path, run: str, rank: int, about: dict[str, Any]) -> None:
        self.path = path
        self._run = run
        self._rank = rank
        self._aside = path.with_name(f".{path.name}.larger")
        self._last: tuple[int, bytes] | None = None  # the page that this rank filled last
        with self._locked(flags=os.O_CREAT) as held:
            header = held.header()
            if header.get("run") == run:
                header["recording"] = sorted({*header["recording"], rank})
                held.put(0, _header(header))
            else:
                header = {"run": run, "first": rank, **about, "recording": [rank]}
                held.replace([_header(header)], ROOM, self._aside)

    def write(self, lines: Iterable[str]) -> None:
        """Append events, each of them one line. Raises OSError."""
        last = self._last
        filled = list(packed(lines, b"" if last is None else last[1]))
        if not filled:
            return
        with self._mine() as held:
            first, more = held.used(), len(filled) - (last is not None)
            if (first + more) * PAGE > LARGEST:
                raise OSError(f"{self.path} has {LARGEST >> 20} MB, more than viewers open")
            if first + more > held.count:
                held.replace(held.pages(first), max(ROOM, more, first // 2), self._aside)
            # The page that this rank filled last is written again, with more lines in it: pages of
            # 4 KB with a line each would make the file many times as large.
            numbers = [*([] if last is None else [last[0]]), *range(first, first + more)]
            for number, page in zip(numbers, filled, strict=True):
                held.put(number, page.ljust(PAGE))
        self._last = numbers[-1], filled[-1]

    def close(self) -> None:
        """Stop writing; the last rank to do so cuts off free pages."""
        with self._mine() as held:
            header = held.header()
            header["recording"] = [rank for rank in header["recording"] if rank != self._rank]
            held.put(0, _header(header))
            if not header["recording"]:
                held.replace(held.pages(held.used()), 0, self._aside)

    @contextmanager
    def _mine(self) -> Iterator[_Held]:
        with self._locked() as held:
            if held.header().get("run") != self._run:
                raise OSError(f"another run writes {self.path} now")
            yield held

    @contextmanager
    def _locked(self, flags: int = 0) -> Iterator[_Held]:
        """Open and lock the file of this name, for this process alone."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
            held = _Held(self.path, fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NoTimeline(f"{self.path} is no plain file")
                fcntl.flock(fd, fcntl.LOCK_EX)
                # Another rank may have renamed a larger file to this path while this one waited
                # for the lock: then this is the lock of a file that is gone.
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    yield held
                    return
            finally:
                held.close()


class _Held:
    """The file while this process holds its lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def count(self) -> int:
        """The number of pages, without the end."""
        return (os.fstat(self._fd).st_size - len(END)) // PAGE

    def header(self) -> dict[str, Any]:
        """The header on the first page; empty in a new file. Raises NoTimeline."""
        page = os.pread(self._fd, PAGE, 0)
        if not page:
            return {}
        header = header_of(page)
        if header is None:
            raise NoTimeline(
                f"{self._path} is there already and is no timeline of ours: remove it, or "
                "name another file"
            )
        return header

    def used(self) -> int:
        """The number of pages in use: free ones follow, the first of which begins with a space."""
        # By bisection, because other ranks fill pages too: the number is in no header, which would
        # have to be written in the same instant as the page.
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if os.pread(self._fd, 1, middle * PAGE) == b" ":
                high = middle
            else:
                low = middle + 1
        return low

    def pages(self, count: int) -> Iterator[bytes]:
        """Yield the first `count` pages, several at a time."""
        at, end = 0, count * PAGE
        while at < end:
            part = os.pread(self._fd, min(1 << 20, end - at), at)
            at += len(part)
            yield part

    def put(self, number: int, page: bytes) -> None:
        """Overwrite one page, in one write."""
        assert len(page) == PAGE
        os.pwrite(self._fd, page, number * PAGE)

    def replace(self, pages: Iterable[bytes], free: int, aside: Path) -> None:
        """Replace the file by `pages` and so many `free` ones, atomically and under the same
        lock."""
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Locked before it has the name: the next rank to open it must wait for this one.
            fcntl.flock(fd, fcntl.LOCK_EX)
            with os.fdopen(os.dup(fd), "wb") as file:
                file.writelines(pages)
                for _ in range(free):
                    file.write(b" " * PAGE)
                file.write(END)
            os.rename(aside, self._path)
        except OSError:
            os.close(fd)
            aside.unlink(missing_ok=True)
            raise
        self.close()
        self._fd = fd

    def close(self) -> None:
        """Release the lock."""
        # Explicitly: the lock belongs to the open file, which a process that was forked meanwhile
        # shares. Closing alone would keep the lock until that process ends too.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            os.close(self._fd)


def packed(lines: Iterable[str], page: bytes = b"") -> Iterator[bytes]:
    """Pack lines into pages, each with a comma before it; the first page holds `page` already."""
    before = len(page)
    for line in lines:
        piece = b"," + line.encode() + b"\n"
        assert len(piece) <= PAGE, line
        if len(page) + len(piece) > PAGE:
            yield page
            page, before = b"", 0
        page += piece
    if len(page) > before:
        yield page


def header_of(page: bytes) -> dict[str, Any] | None:
    """The header on the first page of a timeline of ours; None of another file."""
    try:
        first = json.loads(page.removeprefix(b"["))
    except ValueError:
        return None
    if not isinstance(first, dict) or first.get("name") != NAME:
        return None
    return dict(first["args"])


def _header(about: dict[str, Any]) -> bytes:
    event = {"name": NAME, "ph": "M", "pid": about["first"], "tid": 0, "args": about}
    page = b"[" + json.dumps(event).encode()
    assert len(page) <= PAGE, "too many ranks on a host"
    return page.ljust(PAGE - 1) + b"\n"


def sibling(path: Path, host: str) -> Path:
    """The path for a host that is not rank 0's."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in host)
    return path.with_name(f"{path.stem}.{safe}{path.suffix}")


def siblings(path: Path) -> Sequence[Path]:
    """The files beside `path` that other hosts may have written."""
    return sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))
