"""Writes the timeline file that all ranks of a host share.

The file is valid JSON at all times, even after kill -9.

    | header |,{...},{...}     |,{...}           |                 |                 |]
      page 0   rank 1's, full    rank 0's          free: spaces      free: spaces      end

Free pages are spaces, which JSON allows before the end of the array. A rank overwrites free pages
with its events, one write per page. Linux does not interrupt such a write, so the file is valid
before and after it. If no page is free, a rank writes a larger file next to this one and renames
it. The last rank to stop removes the free pages in the same way. During these operations, a file
lock excludes other ranks. The kernel releases the lock when a process dies.
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
"""Minimum number of pages to add when too few are free."""

LARGEST = 1 << 30
"""Maximum size of a file in bytes. Viewers cannot open larger ones."""

NAME = "shardwise timeline"


class NoTimeline(OSError):
    """Raised if a file exists but is not a Shardwise timeline."""


class TimelineFile:
    """The timeline file at `path`, to which rank `rank` of run `run` writes.

    It replaces the timeline of an earlier run. `about` holds additional header fields. Raises
    OSError if the file cannot be written, and NoTimeline if `path` is a different kind of file.
    """

    def __init__(self, path: Path, run: str, rank: int, about: dict[str, Any]) -> None:
        self.path = path
        self._run = run
        self._rank = rank
        self._temporary = path.with_name(f".{path.name}.larger")
        self._last: tuple[int, bytes] | None = None  # the page that this rank filled last
        with self._locked(flags=os.O_CREAT) as locked:
            header = locked.header()
            if header.get("run") == run:
                header["recording"] = sorted({*header["recording"], rank})
                locked.put(0, _header(header))
            else:
                header = {"run": run, "first": rank, **about, "recording": [rank]}
                locked.replace([_header(header)], ROOM, self._temporary)

    def write(self, lines: Iterable[str]) -> None:
        """Append events, one per line. Raises OSError if the file cannot be written."""
        last = self._last
        filled = list(packed(lines, b"" if last is None else last[1]))
        if not filled:
            return
        with self._own_file() as locked:
            first, more = locked.used(), len(filled) - (last is not None)
            if (first + more) * PAGE > LARGEST:
                raise OSError(
                    f"{self.path} has reached {LARGEST >> 20} MB, the most that viewers open"
                )
            if first + more > locked.count:
                locked.replace(locked.pages(first), max(ROOM, more, first // 2), self._temporary)
            # Rewrite this rank's last page with more lines in it. A page of 4 KB per call would
            # make the file many times larger.
            numbers = [*([] if last is None else [last[0]]), *range(first, first + more)]
            for number, page in zip(numbers, filled, strict=True):
                locked.put(number, page.ljust(PAGE))
        self._last = numbers[-1], filled[-1]

    def close(self) -> None:
        """Stop writing. The last rank to stop removes the free pages."""
        with self._own_file() as locked:
            header = locked.header()
            header["recording"] = [rank for rank in header["recording"] if rank != self._rank]
            locked.put(0, _header(header))
            if not header["recording"]:
                locked.replace(locked.pages(locked.used()), 0, self._temporary)

    @contextmanager
    def _own_file(self) -> Iterator[_LockedFile]:
        with self._locked() as locked:
            if locked.header().get("run") != self._run:
                raise OSError(f"another run writes {self.path} now")
            yield locked

    @contextmanager
    def _locked(self, flags: int = 0) -> Iterator[_LockedFile]:
        """Open the file and lock it exclusively for this process."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
            locked = _LockedFile(self.path, fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NoTimeline(f"{self.path} is no regular file")
                fcntl.flock(fd, fcntl.LOCK_EX)
                # While this rank waited for the lock, another rank may have renamed a larger file
                # to this path. Then this lock is on a deleted file: try again.
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    yield locked
                    return
            finally:
                locked.close()


class _LockedFile:
    """The timeline file while this process holds the file's lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def count(self) -> int:
        """The number of pages, excluding the end of the array."""
        return (os.fstat(self._fd).st_size - len(END)) // PAGE

    def header(self) -> dict[str, Any]:
        """Return the header from the first page, or {} for a new file.

        Raises NoTimeline if the file is not a Shardwise timeline.
        """
        page = os.pread(self._fd, PAGE, 0)
        if not page:
            return {}
        header = header_of(page)
        if header is None:
            raise NoTimeline(
                f"{self._path} exists and is no timeline of Shardwise: remove it, or name another "
                "file"
            )
        return header

    def used(self) -> int:
        """Return the number of used pages. All free pages follow them, and begin with a space."""
        # Find it by bisection. The header cannot store it, because header and page would have to
        # change at the same instant, and a kill between the two writes would make them
        # inconsistent.
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
        """Overwrite one page with a single write."""
        assert len(page) == PAGE
        os.pwrite(self._fd, page, number * PAGE)

    def replace(self, pages: Iterable[bytes], free: int, temporary: Path) -> None:
        """Atomically replace the contents by `pages` and `free` empty pages, and keep the lock."""
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Lock it before the rename, because a rank that opens it must wait for this one.
            fcntl.flock(fd, fcntl.LOCK_EX)
            with os.fdopen(os.dup(fd), "wb") as file:
                file.writelines(pages)
                for _ in range(free):
                    file.write(b" " * PAGE)
                file.write(END)
            os.rename(temporary, self._path)
        except OSError:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._fd = fd

    def close(self) -> None:
        """Release the lock."""
        # Unlock before closing. A child that was forked meanwhile shares the open file, so closing
        # it only here would hold the lock until the child exits.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            os.close(self._fd)


def packed(lines: Iterable[str], page: bytes = b"") -> Iterator[bytes]:
    """Pack lines into pages, with a comma before each line. `page` starts the first page."""
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
    """Return the header in the first page of a timeline, or None if the file is not a timeline."""
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
    """Return the path of the file that `host` writes if rank 0 writes `path` on another host."""
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in host)
    return path.with_name(f"{path.stem}.{safe}{path.suffix}")


def siblings(path: Path) -> Sequence[Path]:
    """Return the timeline files next to `path` that were written by hosts without rank 0."""
    return sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))
