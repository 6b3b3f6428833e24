"""Hands out free ranges of a file, or of memory, and takes them back. Pure arithmetic."""

from __future__ import annotations

from bisect import insort


class Extents:
    """Hands out ranges of a file and takes them back; the file grows only when none fits.

    The lowest range that is long enough is taken, so the file stays short.
    """

    def __init__(self) -> None:
        self.end = 0
        """The file's length in bytes: the most that was in use at once, and what lies between."""
        self._free: list[tuple[int, int]] = []  # (start, end), by start; no two touch

    def take(self, nbytes: int) -> int:
        """The offset of a range of `nbytes`, above 0, in use from now on."""
        assert nbytes > 0
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = (start + nbytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < end else []
                return start
        start = self._free.pop()[0] if self._free and self._free[-1][1] == self.end else self.end
        self.end = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Take back a range that `take` handed out."""
        insort(self._free, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for first, end in self._free:
            if joined and joined[-1][1] == first:
                first = joined.pop()[0]
            joined.append((first, end))
        self._free = joined

    @property
    def used(self) -> list[tuple[int, int]]:
        """The ranges (start, end) that are handed out, neighbours joined."""
        borders = [0, *(border for free in self._free for border in free), self.end]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    @property
    def in_use(self) -> int:
        """Bytes that are handed out."""
        return self.end - sum(end - start for start, end in self._free)
