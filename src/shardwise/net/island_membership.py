"""Decides which islands take part in an exchange, where islands may end and come back. Pure.

    member ── a rank ends ─▶ gone ── its ranks ask ─▶ waiting ── the members admit it ─▶ member

An exchange is complete when all ranks of all members have come to it. Whoever takes part learns so
in one answer, so no rank has a sum that another has not: an island that ends before that is left
out of it by all, one that ends later has taken part for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

BEGINS = "the beginning"
BOUNDARY = "the boundary"
"""How the labels of the exchanges start before which the end of an island ends the run."""

ADMITS = "admit"
"""How the label of the exchange starts that lets islands in: see `admission`."""


def admission(islands: Sequence[int], step: int) -> str:
    """The label of the exchange that lets `islands` in after `step`."""
    return f"{ADMITS} {' '.join(map(str, islands))} after {step}"


def _admitted_by(label: str) -> tuple[list[int], int]:
    """The islands and the step that `admission` was given."""
    named, _, step = label.removeprefix(ADMITS).partition("after")
    return [int(number) for number in named.split()], int(step)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A rank that waits in an exchange: `label` says which. `alone`: only with the ranks of equal
    place in the other islands, else with all."""

    label: str
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`words` for a rank, with what the ranks `sources` have brought to the exchange."""

    rank: int
    words: dict[str, Any]
    sources: tuple[int, ...] = ()


@dataclass
class Membership:
    """The islands of a run, `count` of `size` ranks each, and who waits for what.

    `begun`: all have begun to train, from equal weights. `fresh` islands are back, and have not
    taken part in an exchange since. `admitted`: by island, after which step it was let in last.
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
        """The islands all of whose ranks ask to be let in."""
        gone = [island for island in range(self.count) if island not in self.members]
        return [island for island in gone if self._asking.issuperset(self.ranks(island))]

    def arrive(self, rank: int, arrival: Arrival) -> list[Answer]:
        """`rank` has come to an exchange, and waits. Returns whom to answer now."""
        self._arrived[rank] = arrival
        return list(self._completed())

    def ask_back(self, rank: int) -> None:
        """`rank`, of an island that is gone, asks to be let in."""
        self._asking.add(rank)

    def lose(self, island: int) -> list[Answer]:
        """`island` takes part no longer. Returns whom to answer now: others may have waited for
        it alone."""
        self.members = [each for each in self.members if each != island]
        self.fresh.discard(island)
        for rank in self.ranks(island):
            self._arrived.pop(rank, None)
            self._asking.discard(rank)
        return list(self._completed())

    def readers(self, rank: int, label: str) -> list[int]:
        """The ranks that get what `rank` brings to the exchange `label`: those of its place in the
        members, and all of those islands that are let in by it."""
        place = rank % self.size
        found = [island * self.size + place for island in self.members]
        if label.startswith(ADMITS) and place == 0:
            found += [each for island in _admitted_by(label)[0] for each in self.ranks(island)]
        return [each for each in found if each != rank]

    def missing(self, rank: int) -> list[int]:
        """The ranks for which `rank`, which waits in an exchange, waits."""
        return [each for each in self._partners(rank) if each not in self._arrived]

    def is_fresh(self, rank: int) -> bool:
        """Whether `rank` is of an island that is back, and has not taken part since."""
        return rank // self.size in self.fresh

    def _partners(self, rank: int) -> list[int]:
        """The ranks that come to the exchange in which `rank` waits."""
        if self._arrived[rank].alone:
            return [island * self.size + rank % self.size for island in self.members]
        return [each for island in self.members for each in self.ranks(island)]

    def _completed(self) -> Iterator[Answer]:
        """The answers to all exchanges to which everybody has come."""
        for rank in sorted(self._arrived):
            if rank in self._arrived and self._is_complete(rank):
                yield from self._exchanged(rank)
        everybody = [rank for island in self.members for rank in self.ranks(island)]
        if everybody and all(rank in self._arrived for rank in everybody):
            yield from self._refused(everybody)

    def _is_complete(self, rank: int) -> bool:
        """Whether all have come to the exchange in which `rank` waits."""
        wanted = self._arrived[rank]
        return all(self._arrived.get(each) == wanted for each in self._partners(rank))

    def _exchanged(self, rank: int) -> Iterator[Answer]:
        """End the exchange in which `rank` waits; the answers."""
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
        """Let in those that `label` names and that still wait; returns them."""
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
        """All have come, and to different exchanges: those that have just come back are in the
        wrong one, else nobody knows who is."""
        at_fault = [r for r in everybody if r // self.size in self.fresh] or everybody
        first = next((r for r in everybody if r not in at_fault), everybody[0])
        other = next(r for r in everybody if self._arrived[r] != self._arrived[first])
        words = {"refused": [[r, self._arrived[r].label] for r in (first, other)]}
        for rank in at_fault:
            del self._arrived[rank]
            yield Answer(rank=rank, words=words)
