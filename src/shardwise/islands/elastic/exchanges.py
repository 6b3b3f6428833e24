"""Completes the exchanges between elastic islands: who takes part, and which hosts need which file.

    a host's broker ─▶ a rank came with this ─▶ its readers' brokers have it ─▶ it is here
                    ◀─ all are here: give these ranks that                  (membership.py)

A rank counts as present once all hosts that need its file have it. So when an exchange is complete,
its answers can be given everywhere, whichever host ends meanwhile. No exchange succeeds on one rank
and fails on another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.islands.elastic.broker import Contribution, Delivery, Key
from shardwise.islands.elastic.membership import Answer, Arrival, Membership


class Broker(Protocol):
    """The links of one host: an HostBroker here, or one on another host."""

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Deliver messages and files to ranks, and then drop the files `dropped`."""

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`."""


class FileTransfers(Protocol):
    """Copies files between hosts."""

    def bring(self, what: Contribution, data: str | None, source: Broker, target: Broker) -> bool:
        """Copy a contribution from the broker `source` to `target`; `data` is all of it if it is
        little. Return whether `target` has it at once; else `Exchanges.fetched` is called later."""


@dataclass
class _Held:
    """The file of a rank, the brokers that have it, and those that want it.

    `counts` says whether the rank counts as present.
    """

    what: Contribution
    there: set[Broker]
    wanted: set[Broker]
    counts: bool = False


class Exchanges:
    """The exchanges of `membership` over the brokers of all hosts.

    Args:
        answered: Called after an exchange with the islands that took part.

    Attributes:
        transfers: Copies files from broker to broker; None if there is one broker.
        resuming: Islands that continue from a checkpoint if they are started again.
    """

    def __init__(self, membership: Membership, answered: Callable[[Sequence[int]], None]) -> None:
        self.membership = membership
        self.transfers: FileTransfers | None = None
        self._answered = answered
        self._brokers: dict[int, Broker] = {}
        self._held: dict[int, _Held] = {}
        self.resuming: set[int] = set()
        self._linked: set[int] = set()
        """The ranks whose messages count."""

    # -- brokers and ranks ------------------------------------------------------------------

    def attach(self, broker: Broker, ranks: Iterable[int]) -> None:
        """Let `broker` serve `ranks`."""
        self._brokers |= dict.fromkeys(ranks, broker)

    def detach(self, broker: Broker) -> None:
        """Forget `broker`, whose host is lost: files are not needed there any more."""
        self._brokers = {rank: each for rank, each in self._brokers.items() if each is not broker}
        for held in list(self._held.values()):
            held.there.discard(broker)
            held.wanted.discard(broker)
            self._count(held)

    def link(self, ranks: Iterable[int]) -> None:
        """Accept messages of these ranks, which are about to start."""
        self._linked.update(ranks)

    def lose(self, island: int) -> None:
        """Remove `island`: nobody waits for it, and its messages do not count."""
        ranks = self.membership.ranks(island)
        self._linked.difference_update(ranks)
        for rank in ranks:
            if (broker := self._brokers.get(rank)) is not None:
                broker.shut([rank])
        # Its files first: the answers that follow must not include them.
        self._settle((), ranks)
        self._answer(self.membership.lose(island))
        # Files that only its ranks wanted are wanted no longer, so their owners may count now.
        for held in list(self._held.values()):
            unread = held.wanted - self._readers(held.what)
            for broker in unread:
                broker.settle((), [held.what.key])
            held.wanted -= unread
            self._count(held)

    # -- what ranks bring and ask ---------------------------------------------------------

    def came(self, what: Contribution, data: str | None = None) -> None:
        """Note that a rank has come to an exchange with a file; `data` is the content of a small
        one that other hosts need."""
        broker = self._brokers[what.rank]
        if what.rank not in self._linked:  # its island was lost meanwhile
            broker.settle((), [what.key])
            return
        if what.resumes:
            # Noted with every exchange, since a launcher cannot ask a rank that has ended.
            self.resuming.add(what.rank // self.membership.size)
        self._settle((), [what.rank])
        held = _Held(what, {broker}, self._readers(what) - {broker})
        self._held[what.rank] = held
        for other in list(held.wanted):
            assert self.transfers is not None, "ranks are at several brokers"
            if self.transfers.bring(what, data, broker, other):
                self._has(held, other)
        self._count(held)

    def fetched(self, broker: Broker, key: Key) -> None:
        """Note that `broker` has the file `key` now."""
        held = self._held.get(key[0])
        if held is not None and held.what.key == key and broker in held.wanted:
            self._has(held, broker)
            self._count(held)

    def asks_back(self, rank: int) -> None:
        """Note that `rank`, of an island that is gone, asks to be admitted."""
        if rank in self._linked:
            self.membership.ask_back(rank)

    def asks_who(self, rank: int) -> None:
        """Tell `rank` for whom it waits: for nobody if its answer is in transit."""
        if rank in self._linked:
            missing = self._missing(rank)
            fresh = {each for each in missing if self.membership.is_fresh(each)}
            words = {"missing": missing, "loads": fresh == set(missing)}
            self._brokers[rank].settle([Delivery(rank=rank, words=words)], ())

    def _missing(self, rank: int) -> list[int]:
        held = self._held.get(rank)
        if held is None:
            return []
        if held.counts:
            return self.membership.missing(rank)
        readers = self.membership.readers(rank, held.what.label)
        return [each for each in readers if self._brokers.get(each) in held.wanted]

    def _readers(self, what: Contribution) -> set[Broker]:
        """Return the brokers of the ranks that get `what`."""
        readers = self.membership.readers(what.rank, what.label)
        return {self._brokers[rank] for rank in readers if rank in self._brokers}

    def _has(self, held: _Held, broker: Broker) -> None:
        held.wanted.discard(broker)
        held.there.add(broker)

    def _count(self, held: _Held) -> None:
        """Count the rank as present once all brokers that want its file have it."""
        if not held.wanted and not held.counts:
            held.counts = True
            arrival = Arrival(label=held.what.label, alone=held.what.alone)
            self._answer(self.membership.arrive(held.what.rank, arrival))

    # -- answers --------------------------------------------------------------------------

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Deliver all answers, with the files."""
        self._settle(answers, [answer.rank for answer in answers])
        for islands in {tuple(answer.words.get("islands", ())) for answer in answers}:
            if islands:
                self._answered(islands)

    def _settle(self, answers: Sequence[Answer], ranks: Iterable[int]) -> None:
        """Deliver `answers`, and drop the files of `ranks` on all hosts."""
        given: dict[Broker, list[Delivery]] = defaultdict(list)
        dropped: dict[Broker, list[Key]] = defaultdict(list)
        for answer in answers:
            keys = [self._held[source].what.key for source in answer.sources]
            delivery = Delivery(rank=answer.rank, words=answer.words, keys=keys)
            if (broker := self._brokers.get(answer.rank)) is not None:
                given[broker].append(delivery)
        for rank in ranks:
            if (held := self._held.pop(rank, None)) is not None:
                for broker in held.there | held.wanted:
                    dropped[broker].append(held.what.key)
        for broker in dict.fromkeys([*given, *dropped]):
            broker.settle(given[broker], dropped[broker])
