"""CPU ranks over Gloo."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import gloo_messages
from shardwise.collectives.base import Collectives, Counts, Cuts, Handle, column, slice_of
from shardwise.collectives.ordered_sums import PLAIN, Sum, sum_in_rank_order
from shardwise.collectives.pieces import clipped, join, shorter
from shardwise.collectives.pieces import rows as split_rows
from shardwise.collectives.progress_thread import Courier, Trip
from shardwise.collectives.roster import Roster
from shardwise.collectives.torch_backend import (
    SAME_CALLS,
    explain,
    gathered_rows,
    interval,
    is_late,
    late,
    split,
    wire,
)
from shardwise.errors import CollectiveError, PeerLost
from shardwise.layout import even_cuts
from shardwise.watch.status_server import Lookout

PROBE = 1
"""A tag that no call has: messages that nobody awaits."""

REMEMBERED = 64
"""Calls of which a rank can tell what it has sent in them."""

SMALL = 1 << 14
"""Bytes of a buffer up to which ranks tell each other all of what they sum, one way of a message
and not two; and of messages up to which they are started at once."""

LONG = 1 << 22
"""Bytes of a message whose content is to be summed, at most: the next one comes meanwhile."""


class Arrivals(Protocol):
    """Waits for all messages of a call.

    `then` is told, after each was waited for, how many have come: the first of every rank, then the
    second ones. It is no part of the wait.
    """

    def __call__(self, then: Callable[[int], None] | None = None) -> None: ...


class Gloo(Collectives):
    """CPU ranks over Gloo, by its point-to-point messages.

    Gloo's own reduce-scatter is an all-reduce inside and its all-gather copies more than it
    sends, so both are done here by direct exchange: each rank sends every other rank that one's
    interval and sums what comes in, always in rank order. Measured on 64 MB, 2 ranks: 26 ms
    against 100 (reduce-scatter), 19 against 77 (all-gather); `benchmarks/collectives.py` prints
    the figures of this machine. Messages also know whom they are from: a rank that is lost, or
    does not come, is named.
    """

    name = "gloo"
    sends_pieces = True

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        roster: Roster | None = None,
        timeout: timedelta | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        """`roster` says which ranks of the run these are, where they are not all; `timeout` bounds
        the waits of groups that are split off."""
        super().__init__(rank, size, lookout)
        self._timeout = timeout
        self.roster = roster or Roster.whole(size)
        self._group = group
        self._calls = 0
        # A message that nobody waits for any more (an error came between) must still be received:
        # dropped, it would leave its channel out of step.
        self._unwaited: dict[int, list[tuple[int, dist.Work]]] = {}
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._courier = Courier(self.lookout.waits)
        self._clerk = Courier(self.lookout.waits, name="shardwise-clerk")
        # Else the threads and sockets of a group that nobody has closed would be kept.
        self._end = weakref.finalize(self, _end, group, self._clerk, self._courier)
        self._end.atexit = False
        self._sent: dict[int, dict[int, gloo_messages.Content]] = {}
        self._difference: CollectiveError | None = None
        self._channel = "all" if group is None else str(group.group_name)
        self.lookout.channels[self._channel] = self

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        return self.all_reduce_pieces([buffer], buffer, how)

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        first = self.number()
        cuts = even_cuts(buffer.numel(), self.size)
        if buffer.nbytes <= SMALL:
            join(pieces, buffer)
            return self._exchange_all(first, buffer, how)
        second = self.number()
        own = interval(buffer, cuts, self.rank)
        scatter = self._reduce_scatter(first, pieces, cuts, own, how)
        second_half: list[Handle] = []

        def sum_and_send() -> None:
            scatter.wait()
            second_half.append(self._all_gather(second, buffer, cuts, here=True))

        # Nobody may have to wait for the second half to be begun, so none of us begins it; and
        # nobody waits for its end before the next call is summed.
        trip = self._courier.follow(sum_and_send)

        def finish() -> None:
            self._follow(f"all-reduce (call {first})", trip)
            second_half[0].wait()

        return Handle(finish)

    def _follow(self, call: str, trip: Trip) -> None:
        with self.lookout.waits.noted(call, trip.missing):
            trip.wait()

    def _exchange_all(self, call: int, buffer: Tensor, how: Sum) -> Handle:
        """A small all-reduce: everyone tells everything, and sums all."""
        told = buffer.clone()
        rows = {rank: torch.empty_like(buffer) for rank in self._others}
        receives = {rank: [row] for rank, row in rows.items()}
        sends = dict.fromkeys(rows, (told,))
        received = self.exchange("all-reduce", call, sends, receives, here=True)

        def finish() -> None:
            received()
            rows[self.rank] = told
            sum_in_rank_order([rows[rank] for rank in range(self.size)], buffer, how)

        return Handle(advance=finish)

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        return self.reduce_scatter_pieces([buffer], buffer, cuts, how, into=into)

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        buffer: Tensor,
        cuts: Cuts,
        how: Sum = PLAIN,
        *,
        into: Tensor | None = None,
    ) -> Handle:
        target = interval(buffer, cuts, self.rank) if into is None else into
        return self._reduce_scatter(self.number(), pieces, cuts, target, how)

    def _reduce_scatter(
        self, call: int, pieces: Sequence[Tensor], cuts: Cuts, target: Tensor, how: Sum
    ) -> Handle:
        """Messages for each piece that another rank's interval has a part of, as many from each
        rank: that of each is cut alike."""
        others = self._others
        by_rank = [
            shorter(clipped(pieces, *part), LONG // pieces[0].itemsize) for part in pairwise(cuts)
        ]
        own = by_rank[self.rank]
        lengths = [piece.numel() for piece in own]
        scratch = self.borrow(sum(lengths) * len(others), own[0].dtype)
        rows = dict(zip(others, split_rows(scratch, len(others), lengths), strict=True))
        sends = {rank: by_rank[rank] for rank in others}
        in_order = [rows[rank] if rank != self.rank else own for rank in range(self.size)]
        parts = zip(torch.split(target, lengths), *in_order, strict=True)
        received = self.exchange("reduce-scatter", call, sends, rows)

        def came(number: int) -> None:
            """Sum a piece that all have sent, while the last of it is in the processor's cache."""
            if number % len(others) == 0:
                out, *terms = next(parts)
                sum_in_rank_order(terms, out, how)

        def finish() -> None:
            received(came)
            for out, *terms in parts:  # an empty interval, or a group of one: nothing comes
                sum_in_rank_order(terms, out, how)
            self.give_back(scratch)

        return Handle(advance=finish)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._all_gather(self.number(), buffer, cuts)

    def _all_gather(self, call: int, buffer: Tensor, cuts: Cuts, *, here: bool = False) -> Handle:
        own = interval(buffer, cuts, self.rank)
        receives = {rank: [interval(buffer, cuts, rank)] for rank in self._others}
        sends = dict.fromkeys(receives, (own,))
        return Handle(self.exchange("all-gather", call, sends, receives, here=here))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        is_source = self.rank == source
        sends = dict.fromkeys(self._others, (buffer,)) if is_source else {}
        receives = {} if is_source else {source: [buffer]}
        return Handle(self.exchange("broadcast", self.number(), sends, receives))

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        mine = column(counts, self.rank)
        sends = {r: [sent[slice_of(counts[self.rank], r)]] for r in self._others}
        receives = {r: [received[slice_of(mine, r)]] for r in self._others}
        received[slice_of(mine, self.rank)] = sent[slice_of(counts[self.rank], self.rank)]
        return Handle(self.exchange("all-to-all", self.number(), sends, receives))

    def gather_rows(self, row: Tensor) -> Tensor:
        def gather(buffer: Tensor, cuts: Cuts) -> Handle:
            return self._all_gather(self.number(), buffer, cuts, here=row.nbytes <= SMALL)

        return gathered_rows(self, row, gather)

    def barrier(self) -> None:
        self.gather_rows(torch.zeros(1))

    def second_group(self) -> Collectives:
        return self.split([range(self.size)])

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(members: Sequence[int], group: dist.ProcessGroup) -> Collectives:
            place, roster = members.index(self.rank), self.roster.part(members)
            return Gloo(place, len(members), group, roster, self._timeout, self.lookout)

        return split(self, self.roster, groups, "gloo", make, self._timeout)

    def close(self) -> None:
        self._clerk.close()
        self._end()
        self._courier.close()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def number(self) -> int:
        """The number of this rank's next call, the same on all ranks."""
        self._calls += 1
        return self._calls

    def exchange(
        self,
        what: str,
        call: int,
        sends: gloo_messages.Messages,
        receives: gloo_messages.Messages,
        *,
        here: bool = False,
    ) -> Arrivals:
        """Start the messages to and from every other rank (empty ones are not sent); returns what
        waits for them all. Raises CollectiveError once the group has been closed.

        Gloo sends in the thread that asks for it, as much as the socket takes, and lets that wait
        while bytes of the same rank come in. A backward has better to do: what is large is started
        by a thread of its own, unless it is to be started `here`.
        """
        self._clerk.refuse_if_dismissed()
        self._sent[call] = gloo_messages.contents(what, sends)
        awaited = gloo_messages.contents(what, receives)
        for old in list(self._sent):  # not all calls send, and second halves come later
            if old <= call - REMEMBERED:
                self._sent.pop(old, None)
        works: list[tuple[int, dist.Work]] = []
        self._unwaited[call] = works
        start = partial(self._start, what, call, works, sends, receives)
        if here or gloo_messages.nbytes(sends) + gloo_messages.nbytes(receives) <= SMALL:
            start()
            begun = None
        else:
            begun = self._clerk.follow(start)
        # Not the tensors: whoever looks at this wait must not keep their memory.
        return partial(self._wait, what, call, begun, awaited)

    def _start(
        self,
        what: str,
        call: int,
        works: list[tuple[int, dist.Work]],
        sends: gloo_messages.Messages,
        receives: gloo_messages.Messages,
    ) -> None:
        """Start all messages, those that are received first, and note them in `works`."""
        rank = self.rank
        try:
            for peer, start, tensors in (
                ("group_src", dist.irecv, receives),
                ("group_dst", dist.isend, sends),
            ):
                for rank, tensor in gloo_messages.in_turn(tensors):
                    if tensor.numel():
                        tag, to = gloo_messages.tag(what, call, tensor), {peer: rank}
                        work = start(wire(tensor), group=self._group, tag=tag, **to)
                        assert work is not None
                        works.append((rank, work))
        except RuntimeError as error:
            raise self._given_up(error, f"{what} (call {call})", rank) from error

    def _wait(
        self,
        what: str,
        call: int,
        begun: Trip | None,
        awaited: dict[int, gloo_messages.Content],
        then: Callable[[int], None] | None = None,
    ) -> None:
        self.lookout.refuse_after_failure()
        if begun is not None:
            begun.wait()  # for no other rank
        works, first = self._unwaited[call], 0
        if then is not None:
            to_come = sum(len(lengths) for _, lengths, _ in awaited.values())
            while first < to_come:
                self._wait_for(works[first : first + 1], what, call, awaited)
                first += 1
                then(first)
        if first < len(works):
            self._wait_for(works[first:], what, call, awaited)
        del self._unwaited[call]

    def _wait_for(
        self,
        works: list[tuple[int, dist.Work]],
        what: str,
        call: int,
        awaited: dict[int, gloo_messages.Content],
    ) -> None:
        """Wait for some of the messages of a call. Who is missing are the places of all of them at
        first, then that of the one that is waited for."""
        now = sorted({place for place, _ in works})
        call_in_words, compare = f"{what} (call {call})", partial(self._compare, call, awaited, now)
        with self.lookout.waits.noted(call_in_words, lambda: self._ranks(now), compare):
            for place, work in works:
                now[:] = [place]
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._given_up(error, call_in_words, place) from error
                if self._difference is not None:
                    raise self._difference

    def _given_up(self, error: RuntimeError, call: str, other: int) -> CollectiveError:
        """The error to raise, told to the others; where one of them has given up, its reason."""
        speaker = self.roster.speaker(self.rank)
        if (passed := self.lookout.passed_on(speaker)) is not None:
            return passed
        found = explain(error, speaker, call, self.roster.named([other]))
        if isinstance(found, PeerLost):
            found = explain(error, speaker, call, self.roster.named({other, *self._gone()}))
        elif is_late(error):
            seconds = self._timeout.total_seconds() if self._timeout else 0.0
            found = late(self.lookout, speaker, call, self._ranks([other]), seconds)
        self.lookout.tell(found)
        return found

    # -- ranks in different calls ---------------------------------------------------------

    def _compare(
        self, call: int, contents: dict[int, gloo_messages.Content], now: list[int]
    ) -> None:
        """End a wait for what will never come, since its sender is in another collective."""
        if not now or (place := now[0]) not in contents or self._difference is not None:
            return
        lookout, awaited = self.lookout, gloo_messages.as_json(contents[place])
        rank = self.roster.ranks[place]
        sent = lookout.ask_sent(rank, self._channel, call, self.rank)
        if sent is None or sent == awaited:
            return
        me = self.roster.ranks[self.rank]
        here, there = (
            f"{gloo_messages.in_words(awaited)} on rank {me}",
            f"{gloo_messages.in_words(sent)} on rank {rank}",
        )
        if (passed := lookout.passed_on(self.roster.speaker(self.rank))) is not None:
            self._difference = passed
        else:
            text = f"Call {call} is {here} and {there}, of {self.roster.size}. {lookout.compared()}"
            self._difference = CollectiveError(f"{text}{SAME_CALLS}")
            lookout.tell(self._difference)
        lookout.ask_to_let_go(rank, self._channel, self.rank, [call, awaited])

    def sent(self, call: int, to: int) -> list[Any] | None:
        """What this rank has sent to a place in a call; None where it has not come to that."""
        sent = self._sent.get(call)
        return None if sent is None else gloo_messages.as_json(sent.get(to, gloo_messages.NOTHING))

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Send to a place what it waits for, so that it waits no longer."""
        call, (what, lengths, dtype) = awaited
        for length in lengths:
            filler = torch.zeros(length, dtype=getattr(torch, dtype))
            tag = gloo_messages.tag(what, call, filler)
            try:
                work = dist.isend(wire(filler), group=self._group, tag=tag, group_dst=to)
            except RuntimeError:  # it waits no longer: it is gone
                return
            assert work is not None
            self._unwaited.setdefault(-1, []).append((to, work))

    def _ranks(self, places: Sequence[int]) -> list[int]:
        return [self.roster.ranks[place] for place in places]

    def _gone(self) -> list[int]:
        """The ranks to which no message can be sent any more: who went first is among them, be it
        that another one was lost for its sake."""
        gone = []
        for rank in self._others:
            probe = torch.zeros(1)
            try:
                work = dist.isend(probe, group=self._group, tag=PROBE, group_dst=rank)
            except RuntimeError:
                gone.append(rank)
            else:
                assert work is not None
                self._unwaited.setdefault(-1, []).append((rank, work))
        return gone

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, kept between calls so that no step pays for fresh pages."""
        spare = self._spare.setdefault(dtype, [])
        for index, tensor in enumerate(spare):
            if tensor.numel() >= numel:
                return spare.pop(index)[:numel]
        return torch.empty(numel, dtype=dtype)

    def give_back(self, scratch: Tensor) -> None:
        """Return what `borrow` gave."""
        whole = scratch if scratch._base is None else scratch._base
        self._spare[scratch.dtype].append(whole)


def _end(group: dist.ProcessGroup | None, *couriers: Courier) -> None:
    for courier in couriers:
        courier.dismiss()
    with suppress(ValueError, AssertionError):  # it went with the group that all are in
        dist.destroy_process_group(group)
