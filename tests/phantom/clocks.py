"""Vector clocks (Mattern, 1988) of the host and of each stream: what happened before what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HOST = "the host"

Seen = Mapping[str, int]
"""By name of a stream, or HOST, how much of it has happened."""


class Clocks:
    """Each of the host and the streams counts what it does, and knows how far it saw the others."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}

    def of(self, who: str) -> dict[str, int]:
        """What `who` has seen, itself included."""
        return self._seen.setdefault(who, {who: 0})

    def tick(self, who: str) -> int:
        """Count one more thing that `who` does."""
        mine = self.of(who)
        mine[who] += 1
        return mine[who]

    def learn(self, who: str, seen: Seen) -> None:
        """Let what `who` does from now on come after all that is in `seen`."""
        mine = self.of(who)
        for other, count in seen.items():
            if mine.get(other, 0) < count:
                mine[other] = count

    def has_seen(self, who: str, other: str, count: int) -> bool:
        """Whether the thing number `count` of `other` happened before what `who` does now."""
        return self.of(who).get(other, 0) >= count

    def all_of(self, several: Iterable[str]) -> dict[str, int]:
        """What any of `several` has seen."""
        found: dict[str, int] = {}
        for who in several:
            for other, count in self.of(who).items():
                found[other] = max(count, found.get(other, 0))
        return found

    def everything(self) -> dict[str, int]:
        """All that has been asked for until now."""
        return {who: seen[who] for who, seen in self._seen.items()}
