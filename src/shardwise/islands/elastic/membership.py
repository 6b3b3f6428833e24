"""Decides which elastic islands take part in an exchange, and tells a rank its island. Pure.

    member ── a rank ends ─▶ gone ── its ranks ask ─▶ waiting ── the members admit it ─▶ member

An exchange is complete when all ranks of all members have come to it. One answer tells each rank
who took part. So no rank has a sum that another one lacks: an island that ends before is left out
by all, and one that ends later has taken part for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.net.environment import JOIN_VARIABLE, PREFIX

DELAYS = (
    "{given} and --elastic-islands cannot be had together: an island that ends may have sent what "
    "the others have yet to use. Leave one of them out."
)
"""The error for --late and --behind with elastic islands."""

BEGINS = "the beginning"
BOUNDARY = "the boundary"
"""How the labels start of the first exchanges of training. The end of an island before them ends
the run."""

ADMITS = "admit"
"""How the label of an exchange starts that admits islands, see `admission`."""


def admission(islands: Sequence[int], step: int) -> str:
    """Return the label of the exchange that admits `islands` after `step`."""
    return f"{ADMITS} {' '.join(map(str, islands))} after {step}"


def _admitted_by(label: str) -> tuple[list[int], int]:
    """Return the islands and the step of a label that `admission` made."""
    named, _, step = label.removeprefix(ADMITS).partition("after")
    return [int(number) for number in named.split()], int(step)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A rank that waits in the exchange `label`, with the ranks of equal place in the other islands
    if `alone`, else with all ranks."""

    label: str
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer `words` for a rank, with the files of the ranks `sources`."""

    rank: int
    words: dict[str, Any]
    sources: tuple[int, ...] = ()


@dataclass
class Membership:
    """The islands of a run, `count` of `size` ranks each, and who waits for what.

    Attributes:
        begun: Whether all islands have started to train, from equal weights.
        members: The islands that take part.
        fresh: Islands that are back, and have not taken part in an exchange since.
        admitted: By island, the step after which it was admitted last.
    """

    count: int
    size: int
    begun: bool = False
    members: list[int] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    admitted: dict[int, int] = field(default_factory=dict)
    _arrived: dict[int, Arrival] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = list(range(self.count))

    def ranks(self, island: int) -> range:
        """The ranks of an island."""
        return range(island * self.size, (island + 1) * self.size)

    @property
    def waiting(self) -> list[int]:
        """The islands all of whose ranks ask to be admitted."""
        gone = [island for island in range(self.count) if island not in self.members]
        return [island for island in gone if self._asking.issuperset(self.ranks(island))]

    def arrive(self, rank: int, arrival: Arrival) -> list[Answer]:
        """Note that `rank` waits in an exchange. Returns the answers that are due now."""
        self._arrived[rank] = arrival
        return list(self._completed())

    def ask_back(self, rank: int) -> None:
        """Note that `rank`, of an island that is gone, asks to be admitted."""
        self._asking.add(rank)

    def lose(self, island: int) -> list[Answer]:
        """Remove `island`. Returns the answers that are due now, since others may have waited only
        for it."""
        self.members = [each for each in self.members if each != island]
        self.fresh.discard(island)
        for rank in self.ranks(island):
            self._arrived.pop(rank, None)
            self._asking.discard(rank)
        return list(self._completed())

    def readers(self, rank: int, label: str) -> list[int]:
        """Return the ranks that get the file of `rank` in the exchange `label`.

        These are the ranks of equal place in the members, and all ranks of islands that it admits.
        """
        place = rank % self.size
        found = [island * self.size + place for island in self.members]
        if label.startswith(ADMITS) and place == 0:
            found += [each for island in _admitted_by(label)[0] for each in self.ranks(island)]
        return [each for each in found if each != rank]

    def missing(self, rank: int) -> list[int]:
        """Return the ranks for which `rank` waits in its exchange."""
        return [each for each in self._partners(rank) if each not in self._arrived]

    def is_fresh(self, rank: int) -> bool:
        """Return whether `rank` is of a fresh island."""
        return rank // self.size in self.fresh

    def _partners(self, rank: int) -> list[int]:
        """Return the ranks of the exchange in which `rank` waits."""
        if self._arrived[rank].alone:
            return [island * self.size + rank % self.size for island in self.members]
        return [each for island in self.members for each in self.ranks(island)]

    def _completed(self) -> Iterator[Answer]:
        """Yield the answers to all complete exchanges."""
        for rank in sorted(self._arrived):
            if rank not in self._arrived:
                continue  # it was answered with one before it
            wanted = self._arrived[rank]
            if all(self._arrived.get(each) == wanted for each in self._partners(rank)):
                yield from self._exchanged(rank)
        # All wait, and not in the same exchange: without an answer they would wait for ever.
        everybody = [rank for island in self.members for rank in self.ranks(island)]
        if everybody and all(rank in self._arrived for rank in everybody):
            yield from self._refused(everybody)

    def _exchanged(self, rank: int) -> Iterator[Answer]:
        """Complete the exchange in which `rank` waits, and yield its answers."""
        label, partners, took_part = self._arrived[rank].label, self._partners(rank), self.members
        self.begun |= label.startswith((BEGINS, BOUNDARY))
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
        """Admit the islands that `label` names and that still wait, and return them."""
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
        """Yield refusals to ranks that wait in different exchanges."""
        # A fresh island is at fault, since the others were in step before. Else nobody knows.
        at_fault = [r for r in everybody if r // self.size in self.fresh] or everybody
        first = next((r for r in everybody if r not in at_fault), everybody[0])
        other = next(r for r in everybody if self._arrived[r] != self._arrived[first])
        words = {"refused": [[r, self._arrived[r].label] for r in (first, other)]}
        for rank in at_fault:
            del self._arrived[rank]
            yield Answer(rank=rank, words=words)


# -- the place of a rank ---------------------------------------------------------------------

VARIABLE = PREFIX + "ISLAND"
"""Holds the IslandPlace of a rank as JSON."""

JOIN = "shardwise.islands.elastic.collectives:join"
"""The function by which such a rank joins the others."""


@dataclass(frozen=True, kw_only=True)
class IslandPlace:
    """The island of a rank.

    Attributes:
        island: Number of the island, of `count`.
        size: Ranks of an island.
        fd: The rank's end of a socket to the launcher, which it inherits.
        returns: Whether the others train without this island until they admit it.
    """

    island: int
    count: int
    size: int
    fd: int
    returns: bool

    @property
    def first(self) -> int:
        """The first rank of the island."""
        return self.island * self.size

    def variables(self) -> dict[str, str]:
        """Return the variables for the rank."""
        return {VARIABLE: json.dumps(asdict(self)), JOIN_VARIABLE: JOIN}


def read(environ: Mapping[str, str]) -> IslandPlace | None:
    """Return the place that `variables` wrote, None if islands are not elastic."""
    text = environ.get(VARIABLE)
    return None if text is None else IslandPlace(**json.loads(text))


def ranks_here(island: range, first: int, count: int) -> range:
    """Return the ranks of `island` on the host that has `count` ranks from `first` on."""
    start = max(island.start, first)
    return range(start, max(start, min(island.stop, first + count)))
