"""Allocates ranges of a file or of memory. Pure arithmetic."""

from __future__ import annotations

from bisect import insort


class Extents:
    """Allocates ranges of a file or of memory.

    Uses the lowest free range that is long enough. The file grows only if there is no such range.
    """

    def __init__(self) -> None:
        self.end = 0
        """Length of the file in bytes."""
        self._free: list[tuple[int, int]] = []
        """Sorted free ranges (start, end). No two are adjacent."""

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes` (at least 1), and return the offset of the range."""
        assert nbytes > 0
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = (start + nbytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < end else []
                return start
        # If the file ends with a free range that is too short, extend that range.
        start = self._free.pop()[0] if self._free and self._free[-1][1] == self.end else self.end
        self.end = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Free a range returned by `take`, and merge it with adjacent free ranges."""
        insort(self._free, (start, start + nbytes))
        # Without merging, the free space would fragment into ranges too short for a new record.
        joined: list[tuple[int, int]] = []
        for first, end in self._free:
            if joined and joined[-1][1] == first:
                first = joined.pop()[0]
            joined.append((first, end))
        self._free = joined

    @property
    def used(self) -> list[tuple[int, int]]:
        """Sorted allocated ranges (start, end), with adjacent ranges merged."""
        # The used ranges are the gaps between the free ones.
        borders = [0, *(border for free in self._free for border in free), self.end]
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    @property
    def in_use(self) -> int:
        """Number of allocated bytes."""
        return self.end - sum(end - start for start, end in self._free)
