"""The last reads and writes of a block of memory, by byte range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """Access number `count` of `who`: a read or write of the bytes from `first` to `end`."""

    first: int
    end: int
    who: str
    count: int
    writes: bool
    what: str
    where: object
    """The lines that asked for the operation `what`; converted to text when needed."""

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        return f"{verb} on {self.who} by {self.what} in {self.where}"

    def covers(self, other: Access) -> bool:
        """Return whether this access contains all bytes of `other`."""
        return self.first <= other.first and other.end <= self.end

    def conflicts(self, other: Access) -> bool:
        """Return whether both touch a common byte, and at least one writes it."""
        shared = self.first < other.end and other.first < self.end
        return shared and (self.writes or other.writes)


InOrder = Callable[[Access], bool]
"""Returns whether an earlier access is known to have happened before the new one."""


class Log:
    """The accesses of one block that a later one might have to wait for."""

    def __init__(self) -> None:
        self.last: list[Access] = []

    def add(self, new: Access, in_order: InOrder) -> Access | None:
        """Add `new`; return an earlier access that conflicts with it and is not ordered."""
        found = None
        kept = []
        for old in self.last:
            if found is None and new.conflicts(old) and not in_order(old):
                found = old
            if not _replaces(new, old, in_order):
                kept.append(old)
        kept.append(new)
        self.last = kept
        return found


def _replaces(new: Access, old: Access, in_order: InOrder) -> bool:
    """Return whether a later access that is in order with `new` can ignore `old`."""
    if not new.covers(old):
        return False
    if new.writes:
        return in_order(old)
    return old.who == new.who and not old.writes
