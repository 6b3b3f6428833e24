"""Leads the exchanges between elastic islands: who takes part, and where what they bring has to be.

    desk of a host ─▶ a rank came with this ─▶ the desks of those who get it have it ─▶ it is here
                   ◀─ all are here: give these ranks that                  (island_membership.py)

A rank counts as come once all hosts have what it brings that will need it. So when an exchange is
complete, its answers can be given everywhere, whichever host ends meanwhile: there is none that has
succeeded on one rank and failed on another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.net.island_desk import Contribution, Delivery, Key
from shardwise.net.island_membership import Answer, Arrival, Membership


class Desk(Protocol):
    """The links of one host: an IslandDesk here, or one on another host."""

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Give ranks what is for them, and then forget what is known by the keys `dropped`."""

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`."""


class Transfers(Protocol):
    """Moves what is brought between hosts."""

    def bring(self, what: Contribution, data: str | None, source: Desk, target: Desk) -> bool:
        """Let `target` have what the desk `source` has, of which `data` is all where it is little.
        Whether it has it at once; else `IslandHub.fetched` is called when it has."""


@dataclass
class _Held:
    """What a rank has brought: at which desks it is, and at which it is wanted. `counts`: the rank
    has come."""

    what: Contribution
    there: set[Desk]
    wanted: set[Desk]
    counts: bool = False


class IslandHub:
    """The exchanges of `membership` over the desks of all hosts.

    `answered` is called after an exchange, with the numbers of the islands that took part;
    `transfers` move what is brought from desk to desk, None where there is one.
    """

    def __init__(self, membership: Membership, answered: Callable[[Sequence[int]], None]) -> None:
        self.membership = membership
        self.transfers: Transfers | None = None
        self._answered = answered
        self._desks: dict[int, Desk] = {}
        self._held: dict[int, _Held] = {}
        self.resuming: set[int] = set()
        """The islands that go on from a checkpoint when they are started again."""
        self._linked: set[int] = set()
        """The ranks that are heard."""

    # -- desks and ranks ------------------------------------------------------------------

    def attach(self, desk: Desk, ranks: Iterable[int]) -> None:
        """The links of `ranks` are those of `desk`."""
        self._desks |= dict.fromkeys(ranks, desk)

    def detach(self, desk: Desk) -> None:
        """The host of `desk` is lost, whose islands take part no longer: nothing is wanted there
        any more."""
        self._desks = {rank: each for rank, each in self._desks.items() if each is not desk}
        for held in list(self._held.values()):
            held.there.discard(desk)
            held.wanted.discard(desk)
            self._count(held)

    def link(self, ranks: Iterable[int]) -> None:
        """Hear these ranks, which are about to start."""
        self._linked.update(ranks)

    def lose(self, island: int) -> None:
        """`island` takes part no longer: nobody waits for it, nor is it heard."""
        ranks = self.membership.ranks(island)
        self._linked.difference_update(ranks)
        for rank in ranks:
            if (desk := self._desks.get(rank)) is not None:
                desk.shut([rank])
        self._settle((), ranks)
        self._answer(self.membership.lose(island))
        for held in list(self._held.values()):
            unread = held.wanted - self._readers(held.what)
            for desk in unread:
                desk.settle((), [held.what.key])
            held.wanted -= unread
            self._count(held)

    # -- what ranks bring and ask ---------------------------------------------------------

    def came(self, what: Contribution, data: str | None = None) -> None:
        """A rank has come to an exchange; `data` is what it brings, where that is little and to go
        to other hosts."""
        desk = self._desks[what.rank]
        if what.rank not in self._linked:  # its island was lost meanwhile
            desk.settle((), [what.key])
            return
        if what.resumes:
            self.resuming.add(what.rank // self.membership.size)
        self._settle((), [what.rank])
        held = _Held(what, {desk}, self._readers(what) - {desk})
        self._held[what.rank] = held
        for other in list(held.wanted):
            assert self.transfers is not None, "ranks are at several desks"
            if self.transfers.bring(what, data, desk, other):
                self._has(held, other)
        self._count(held)

    def fetched(self, desk: Desk, key: Key) -> None:
        """`desk` has what is known by `key` now."""
        held = self._held.get(key[0])
        if held is not None and held.what.key == key and desk in held.wanted:
            self._has(held, desk)
            self._count(held)

    def asks_back(self, rank: int) -> None:
        """`rank`, of an island that is gone, asks to be let in."""
        if rank in self._linked:
            self.membership.ask_back(rank)

    def asks_who(self, rank: int) -> None:
        """Tell `rank` for whom it waits; nobody where its answer is on the way."""
        if rank in self._linked:
            missing = self._missing(rank)
            fresh = {each for each in missing if self.membership.is_fresh(each)}
            words = {"missing": missing, "loads": fresh == set(missing)}
            self._desks[rank].settle([Delivery(rank=rank, words=words)], ())

    def _missing(self, rank: int) -> list[int]:
        held = self._held.get(rank)
        if held is None:
            return []
        if held.counts:
            return self.membership.missing(rank)
        readers = self.membership.readers(rank, held.what.label)
        return [each for each in readers if self._desks.get(each) in held.wanted]

    def _readers(self, what: Contribution) -> set[Desk]:
        """The desks of those who get `what`."""
        readers = self.membership.readers(what.rank, what.label)
        return {self._desks[rank] for rank in readers if rank in self._desks}

    def _has(self, held: _Held, desk: Desk) -> None:
        held.wanted.discard(desk)
        held.there.add(desk)

    def _count(self, held: _Held) -> None:
        """Let who has brought this be here, once it is wherever it is wanted."""
        if not held.wanted and not held.counts:
            held.counts = True
            arrival = Arrival(label=held.what.label, alone=held.what.alone)
            self._answer(self.membership.arrive(held.what.rank, arrival))

    # -- answers --------------------------------------------------------------------------

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Give all answers; what was brought has been passed on then."""
        self._settle(answers, [answer.rank for answer in answers])
        for islands in {tuple(answer.words.get("islands", ())) for answer in answers}:
            if islands:
                self._answered(islands)

    def _settle(self, answers: Sequence[Answer], ranks: Iterable[int]) -> None:
        """Give `answers`, and forget everywhere what `ranks` have brought."""
        given: dict[Desk, list[Delivery]] = defaultdict(list)
        dropped: dict[Desk, list[Key]] = defaultdict(list)
        for answer in answers:
            keys = [self._held[source].what.key for source in answer.sources]
            delivery = Delivery(rank=answer.rank, words=answer.words, keys=keys)
            if (desk := self._desks.get(answer.rank)) is not None:
                given[desk].append(delivery)
        for rank in ranks:
            if (held := self._held.pop(rank, None)) is not None:
                for desk in held.there | held.wanted:
                    dropped[desk].append(held.what.key)
        for desk in dict.fromkeys([*given, *dropped]):
            desk.settle(given[desk], dropped[desk])
