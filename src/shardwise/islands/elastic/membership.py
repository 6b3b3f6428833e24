"""Decides which elastic islands take part in an exchange, and tells each rank its island.

    member ── a rank exits ─▶ gone ── its ranks ask ─▶ waiting ── members admit it ─▶ member

An exchange is complete once all ranks of all members have contributed to it. All ranks receive the
same list of participating islands, so all compute the same sum. An island that fails before the
exchange is complete is excluded on all ranks. An island that fails afterwards is included on all
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.net.environment import JOIN_VARIABLE, PREFIX

DELAYS = (
    "{flag} cannot be combined with --elastic-islands: a failed island may have sent differences "
    "that the others have not used yet. Remove one of them."
)
"""The error message for --late and --behind with elastic islands."""

BEGINS = "the beginning"
BOUNDARY = "the boundary"
"""Label prefixes of the first exchanges in training. If an island fails before them, the run fails.
"""

ADMITS = "admit"
"""Label prefix of an exchange that admits islands (see `admission`)."""


def admission(islands: Sequence[int], step: int) -> str:
    """Return the label of the exchange that admits `islands` after step `step`."""
    return f"{ADMITS} {' '.join(map(str, islands))} after {step}"


def _admitted_by(label: str) -> tuple[list[int], int]:
    """Parse a label from `admission` into the admitted islands and the step."""
    named, _, step = label.removeprefix(ADMITS).partition("after")
    return [int(number) for number in named.split()], int(step)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The exchange in which a rank is waiting.

    Args:
        label: The name of the exchange.
        alone: True if only the rank's peers take part, False if all ranks do.
    """

    label: str
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A message for a rank: its content `words`, and the ranks whose files are sent with it."""

    rank: int
    words: dict[str, Any]
    sources: tuple[int, ...] = ()


@dataclass
class Membership:
    """The islands of a run, and the pending exchanges between their ranks.

    Attributes:
        count: The number of islands.
        size: The number of ranks per island.
        has_begun: True once all islands have started training, with identical weights.
        members: The participating islands.
        fresh: The islands that were readmitted and have not taken part in an exchange since.
        admitted: For each island, the step after which it was last admitted.
    """

    count: int
    size: int
    has_begun: bool = False
    members: list[int] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    admitted: dict[int, int] = field(default_factory=dict)
    _arrived: dict[int, Arrival] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = list(range(self.count))

    def ranks(self, island: int) -> range:
        return range(island * self.size, (island + 1) * self.size)

    @property
    def waiting(self) -> list[int]:
        """Islands that were removed, and whose ranks have all asked to be admitted."""
        gone = [island for island in range(self.count) if island not in self.members]
        return [island for island in gone if self._asking.issuperset(self.ranks(island))]

    def arrive(self, rank: int, arrival: Arrival) -> list[Answer]:
        """Record that `rank` waits in an exchange. Return the answers if this completes it."""
        self._arrived[rank] = arrival
        return list(self._completed())

    def request_return(self, rank: int) -> None:
        """Record that `rank`, whose island was removed, asks to be admitted."""
        self._asking.add(rank)

    def lose(self, island: int) -> list[Answer]:
        """Remove `island`. Return the answers of exchanges that were waiting only for it."""
        # Create a new list, because answers in transit refer to the old one.
        self.members = [each for each in self.members if each != island]
        self.fresh.discard(island)
        for rank in self.ranks(island):
            self._arrived.pop(rank, None)
            self._asking.discard(rank)
        return list(self._completed())

    def readers(self, rank: int, label: str) -> list[int]:
        """Return the ranks that receive `rank`'s file in the exchange `label`.

        These are its peers in the member islands. In an admission, the first rank of each island
        also sends its file to all ranks of the admitted islands.
        """
        place = rank % self.size
        readers = [island * self.size + place for island in self.members]
        if label.startswith(ADMITS) and place == 0:
            readers += [each for island in _admitted_by(label)[0] for each in self.ranks(island)]
        return [each for each in readers if each != rank]

    def missing(self, rank: int) -> list[int]:
        """Return the ranks that have not yet joined `rank`'s pending exchange."""
        return [each for each in self._partners(rank) if each not in self._arrived]

    def is_fresh(self, rank: int) -> bool:
        """Return whether `rank`'s island is in `fresh`."""
        return rank // self.size in self.fresh

    def _partners(self, rank: int) -> list[int]:
        """Return all ranks that take part in `rank`'s pending exchange."""
        if self._arrived[rank].alone:
            return [island * self.size + rank % self.size for island in self.members]
        return [each for island in self.members for each in self.ranks(island)]

    def _completed(self) -> Iterator[Answer]:
        # Sorted, so that the order of answers does not depend on the order of arrival.
        for rank in sorted(self._arrived):
            if rank not in self._arrived:
                continue  # answered together with an earlier rank
            arrival = self._arrived[rank]
            if all(self._arrived.get(each) == arrival for each in self._partners(rank)):
                yield from self._exchanged(rank)
        # All ranks wait, but in different exchanges. Without an answer they would wait forever.
        everybody = [rank for island in self.members for rank in self.ranks(island)]
        if everybody and all(rank in self._arrived for rank in everybody):
            yield from self._refused(everybody)

    def _exchanged(self, rank: int) -> Iterator[Answer]:
        """Complete `rank`'s pending exchange, and yield its answers."""
        # Read `took_part` before `_admit`, which adds members for the next exchange.
        label, partners, took_part = self._arrived[rank].label, self._partners(rank), self.members
        self.has_begun |= label.startswith((BEGINS, BOUNDARY))
        admitted = self._admit(label)
        self.fresh.difference_update(took_part)
        words = {"islands": took_part, "members": self.members, "waiting": self.waiting}
        for each in partners:
            del self._arrived[each]
            others = [island for island in took_part if each not in self.ranks(island)]
            sources = tuple(island * self.size + each % self.size for island in others)
            yield Answer(rank=each, words=words, sources=sources)
        for island in admitted:
            for each in self.ranks(island):
                yield Answer(rank=each, words=words, sources=(took_part[0] * self.size,))

    def _admit(self, label: str) -> list[int]:
        """Admit the islands named in `label` that are still waiting, and return them."""
        if not label.startswith(ADMITS):
            return []
        named, step = _admitted_by(label)
        admitted = [island for island in self.waiting if island in named]
        self.members = sorted([*self.members, *admitted])
        self.fresh.update(admitted)
        for island in admitted:
            self._asking.difference_update(self.ranks(island))
            self.admitted[island] = step
        return admitted

    def _refused(self, everybody: list[int]) -> Iterator[Answer]:
        """Yield error answers if all ranks are waiting, but in different exchanges."""
        # If there is a fresh island, it is at fault, because the other islands agreed before.
        # Otherwise the rank at fault is unknown.
        at_fault = [r for r in everybody if r // self.size in self.fresh] or everybody
        first = next((r for r in everybody if r not in at_fault), everybody[0])
        other = next(r for r in everybody if self._arrived[r] != self._arrived[first])
        words = {"refused": [[r, self._arrived[r].label] for r in (first, other)]}
        for rank in at_fault:
            del self._arrived[rank]
            yield Answer(rank=rank, words=words)


# -- the island of a rank --------------------------------------------------------------------

VARIABLE = PREFIX + "ISLAND"
"""Variable that holds a rank's IslandPlace as JSON."""

JOIN = "shardwise.islands.elastic.collectives:join"
"""The function that connects a rank of an elastic island to the other ranks."""


@dataclass(frozen=True, kw_only=True)
class IslandPlace:
    """A rank's island, and the rank's socket to the launcher.

    Attributes:
        island: The island's index, less than `count`.
        count: The number of islands.
        size: The number of ranks per island.
        fd: Descriptor of the rank's end of the socket, which the rank inherits.
        returns: True if the other islands train without this one until they admit it.
    """

    island: int
    count: int
    size: int
    fd: int
    returns: bool

    @property
    def first(self) -> int:
        """The lowest rank of the island."""
        return self.island * self.size

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass this place to the rank."""
        return {VARIABLE: json.dumps(asdict(self)), JOIN_VARIABLE: JOIN}


def read(environ: Mapping[str, str]) -> IslandPlace | None:
    """Read a rank's place from the environment. Return None if islands are not elastic."""
    text = environ.get(VARIABLE)
    return None if text is None else IslandPlace(**json.loads(text))


def ranks_here(island: range, first: int, count: int) -> range:
    """Return the ranks of `island` on the host that has `count` ranks starting at `first`."""
    start = max(island.start, first)
    return range(start, max(start, min(island.stop, first + count)))
