"""Completes exchanges between elastic islands, and copies files to the hosts that need them.

    a host's broker ─▶ a rank has contributed ─▶ its readers' brokers get the file ─▶ it is present
                    ◀─ all are present: deliver these files to these ranks          (membership.py)

A rank counts as present once all hosts that need its file have it. When an exchange is complete,
its answers can therefore be delivered everywhere, even if a host fails in the meantime. No exchange
succeeds on one rank and fails on another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.islands.elastic.broker import Contribution, Delivery, Key
from shardwise.islands.elastic.membership import Answer, Arrival, Membership


class Broker(Protocol):
    """Interface of a host's broker: a HostBroker in this process, or a RemoteBroker."""

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Deliver messages and files to ranks, then delete the files in `dropped`."""

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`."""


class FileTransfers(Protocol):
    """Interface for copying files between hosts."""

    def bring(self, what: Contribution, data: str | None, source: Broker, target: Broker) -> bool:
        """Copy a contribution from the broker `source` to the broker `target`.

        `data` is the file's content if the file is small, otherwise None. Returns True if `target`
        has the file on return. Otherwise, `Exchanges.mark_fetched` is called later.
        """


@dataclass
class _HeldFile:
    """A rank's file, the brokers that have it, and the brokers that still need it.

    `is_counted` is True once the rank is counted as present in its exchange.
    """

    what: Contribution
    holders: set[Broker]
    missing: set[Broker]
    is_counted: bool = False


class Exchanges:
    """Runs the exchanges of `membership` over the brokers on all hosts.

    Args:
        membership: Decides which islands take part.
        answered: Called after each exchange with the islands that took part.

    Attributes:
        transfers: Copies files between brokers, or None if there is only one broker.
        resuming: The islands that would resume from a checkpoint after a restart.
    """

    def __init__(self, membership: Membership, answered: Callable[[Sequence[int]], None]) -> None:
        self.membership = membership
        self.transfers: FileTransfers | None = None
        self._answered = answered
        self._brokers: dict[int, Broker] = {}
        self._held: dict[int, _HeldFile] = {}
        self.resuming: set[int] = set()
        self._linked: set[int] = set()
        """The ranks whose messages are accepted."""

    # -- brokers and ranks ------------------------------------------------------------------

    def attach(self, broker: Broker, ranks: Iterable[int]) -> None:
        """Register `broker` to deliver answers to `ranks`."""
        self._brokers |= dict.fromkeys(ranks, broker)

    def detach(self, broker: Broker) -> None:
        """Remove `broker`, whose host has been lost and therefore needs no more files."""
        self._brokers = {rank: each for rank, each in self._brokers.items() if each is not broker}
        for held in list(self._held.values()):
            held.holders.discard(broker)
            held.missing.discard(broker)
            self._count(held)

    def link(self, ranks: Iterable[int]) -> None:
        """Accept messages from `ranks`, which are about to start."""
        self._linked.update(ranks)

    def lose(self, island: int) -> None:
        """Remove `island`. No rank waits for it any more, and messages from it are ignored."""
        ranks = self.membership.ranks(island)
        self._linked.difference_update(ranks)
        for rank in ranks:
            if (broker := self._brokers.get(rank)) is not None:
                broker.shut([rank])
        # Drop its files first, because the answers that follow must not include them.
        self._settle((), ranks)
        self._answer(self.membership.lose(island))
        # Files that only its ranks needed are no longer needed, so their owners may now count as
        # present.
        for held in list(self._held.values()):
            unread = held.missing - self._readers(held.what)
            for broker in unread:
                broker.settle((), [held.what.key])
            held.missing -= unread
            self._count(held)

    # -- what ranks bring and ask ---------------------------------------------------------

    def contribute(self, what: Contribution, data: str | None = None) -> None:
        """Record that a rank has contributed a file to an exchange.

        `data` is the file's content if the file is small and other hosts need it, otherwise None.
        """
        broker = self._brokers[what.rank]
        if what.rank not in self._linked:  # its island was lost in the meantime
            broker.settle((), [what.key])
            return
        if what.resumes:
            # Record it with every exchange, because the launcher cannot ask a rank that has exited.
            self.resuming.add(what.rank // self.membership.size)
        # Drop the file of the rank's previous exchange.
        self._settle((), [what.rank])
        held = _HeldFile(what, {broker}, self._readers(what) - {broker})
        self._held[what.rank] = held
        for other in list(held.missing):
            assert self.transfers is not None, "ranks use several brokers"
            if self.transfers.bring(what, data, broker, other):
                self._has(held, other)
        self._count(held)

    def mark_fetched(self, broker: Broker, key: Key) -> None:
        """Record that `broker` now has the file `key`."""
        held = self._held.get(key[0])
        if held is not None and held.what.key == key and broker in held.missing:
            self._has(held, broker)
            self._count(held)

    def request_return(self, rank: int) -> None:
        """Record that `rank`, whose island was removed, asks to be admitted."""
        if rank in self._linked:
            self.membership.request_return(rank)

    def report_missing(self, rank: int) -> None:
        """Tell `rank` which ranks its exchange is still waiting for.

        No ranks are missing if the answer to `rank` is already in transit.
        """
        if rank in self._linked:
            missing = self._missing(rank)
            fresh = {each for each in missing if self.membership.is_fresh(each)}
            words = {"missing": missing, "loads": fresh == set(missing)}
            self._brokers[rank].settle([Delivery(rank=rank, words=words)], ())

    def _missing(self, rank: int) -> list[int]:
        held = self._held.get(rank)
        if held is None:
            return []
        if held.is_counted:
            return self.membership.missing(rank)
        readers = self.membership.readers(rank, held.what.label)
        # All ranks may have contributed, but a reader's host may not have the file yet.
        return [each for each in readers if self._brokers.get(each) in held.missing]

    def _readers(self, what: Contribution) -> set[Broker]:
        """Return the brokers of the ranks that read the contribution `what`."""
        readers = self.membership.readers(what.rank, what.label)
        return {self._brokers[rank] for rank in readers if rank in self._brokers}

    def _has(self, held: _HeldFile, broker: Broker) -> None:
        held.missing.discard(broker)
        held.holders.add(broker)

    def _count(self, held: _HeldFile) -> None:
        """Count the file's rank as present once all brokers that need the file have it."""
        if not held.missing and not held.is_counted:
            held.is_counted = True
            arrival = Arrival(label=held.what.label, alone=held.what.alone)
            self._answer(self.membership.arrive(held.what.rank, arrival))

    # -- answers --------------------------------------------------------------------------

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Deliver answers with their files, and report which islands took part."""
        self._settle(answers, [answer.rank for answer in answers])
        for islands in {tuple(answer.words.get("islands", ())) for answer in answers}:
            if islands:
                self._answered(islands)

    def _settle(self, answers: Sequence[Answer], ranks: Iterable[int]) -> None:
        """Deliver `answers`, and drop `ranks`' files on all hosts."""
        deliveries: dict[Broker, list[Delivery]] = defaultdict(list)
        dropped: dict[Broker, list[Key]] = defaultdict(list)
        for answer in answers:
            keys = [self._held[source].what.key for source in answer.sources]
            delivery = Delivery(rank=answer.rank, words=answer.words, keys=keys)
            if (broker := self._brokers.get(answer.rank)) is not None:
                deliveries[broker].append(delivery)
        for rank in ranks:
            if (held := self._held.pop(rank, None)) is not None:
                for broker in held.holders | held.missing:
                    dropped[broker].append(held.what.key)
        for broker in dict.fromkeys([*deliveries, *dropped]):
            broker.settle(deliveries[broker], dropped[broker])
