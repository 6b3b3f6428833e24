"""Which ranks of the run a group has: what errors call them by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.watch.wait_graph import named


@dataclass(frozen=True)
class Roster:
    """The members of a group by their place in it, as ranks of a run of `size` ranks."""

    ranks: tuple[int, ...]
    size: int

    @classmethod
    def whole(cls, size: int) -> Roster:
        """All ranks of a run."""
        return cls(tuple(range(size)), size)

    def part(self, places: Sequence[int]) -> Roster:
        """A group of some of these."""
        return Roster(tuple(self.ranks[place] for place in places), self.size)

    def speaker(self, place: int) -> str:
        """How a message about this rank begins: "Rank 3 of 4"."""
        return f"Rank {self.ranks[place]} of {self.size}"

    def named(self, places: Iterable[int]) -> str:
        """Others: "rank 2", or "ranks 0, 2"."""
        return named(self.ranks[place] for place in places)
