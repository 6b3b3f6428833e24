"""Vector clocks (Mattern, 1988) of the host and of each stream: what happened before what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HOST = "the host"

Seen = Mapping[str, int]
"""By stream name, or HOST, the number of its actions that have happened."""


class Clocks:
    """The clocks of the host and of all streams: each counts its actions, and those it has seen."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}

    def of(self, who: str) -> dict[str, int]:
        """Return the actions that `who` has seen, with its own."""
        return self._seen.setdefault(who, {who: 0})

    def tick(self, who: str) -> int:
        """Count one more action of `who`."""
        mine = self.of(who)
        mine[who] += 1
        return mine[who]

    def learn(self, who: str, seen: Seen) -> None:
        """Order all further actions of `who` after everything in `seen`."""
        mine = self.of(who)
        for other, count in seen.items():
            if mine.get(other, 0) < count:
                mine[other] = count

    def has_seen(self, who: str, other: str, count: int) -> bool:
        """Return whether action `count` of `other` happened before the next action of `who`."""
        return self.of(who).get(other, 0) >= count

    def all_of(self, several: Iterable[str]) -> dict[str, int]:
        """Return the union of what `several` have seen."""
        found: dict[str, int] = {}
        for who in several:
            for other, count in self.of(who).items():
                found[other] = max(count, found.get(other, 0))
        return found

    def everything(self) -> dict[str, int]:
        """Return all actions that were asked for so far."""
        return {who: seen[who] for who, seen in self._seen.items()}
