"""CPU ranks over Gloo."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.base import Collectives, Cuts, Each, Handle
from shardwise.collectives.courier import Courier
from shardwise.collectives.roster import Roster
from shardwise.collectives.sums import sum_in_rank_order
from shardwise.collectives.wire import explain, interval, split, wire
from shardwise.errors import PeerLost
from shardwise.layout import even_cuts

PROBE = 1
"""A tag that no call has: messages that nobody awaits."""

SMALL = 1 << 14
"""Bytes up to which ranks tell each other all of what they sum: one way of a message, not two."""


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

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        roster: Roster | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`roster` says which ranks of the run these are, where they are not all; `timeout` bounds
        the waits of groups that are split off."""
        super().__init__(rank, size)
        self._timeout = timeout
        self.roster = roster or Roster.whole(size)
        self._group = group
        self._calls = 0
        # A message that nobody waits for any more (an error came between) must still be received:
        # dropped, it would leave its channel out of step.
        self._unwaited: dict[int, list[tuple[int, dist.Work]]] = {}
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._courier = Courier()

    def all_reduce(
        self,
        buffer: Tensor,
        *,
        exact_sum: bool = True,
        tree: bool = False,
        each: Each | None = None,
    ) -> Handle:
        first, second = self.number(), self.number()
        cuts = even_cuts(buffer.numel(), self.size)
        if buffer.nbytes <= SMALL:
            return self._exchange_all(first, buffer, exact_sum, tree, each)
        own = interval(buffer, cuts, self.rank)
        scatter = self._reduce_scatter(first, buffer, cuts, own, exact_sum, tree, each)
        second_half: list[Handle] = []

        def sum_and_send() -> None:
            scatter.wait()
            second_half.append(self._all_gather(second, buffer, cuts))

        # Nobody may have to wait for the second half to be begun, so none of us begins it; and
        # nobody waits for its end before the next call is summed.
        trip = self._courier.follow(sum_and_send)

        def finish() -> None:
            trip.wait()
            second_half[0].wait()

        return Handle(finish)

    def _exchange_all(
        self, call: int, buffer: Tensor, exact_sum: bool, tree: bool, each: Each | None
    ) -> Handle:
        """A small all-reduce: everyone tells everything, and sums all."""
        told = buffer.clone()
        rows = {rank: torch.empty_like(buffer) for rank in self._others}
        received = self.exchange("all-reduce", call, dict.fromkeys(rows, told), rows)

        def finish() -> None:
            received()
            rows[self.rank] = told
            sum_in_rank_order(
                [rows[rank] for rank in range(self.size)], buffer, exact_sum=exact_sum, tree=tree
            )
            if each is not None:
                each(interval(buffer, even_cuts(buffer.numel(), self.size), self.rank))

        return Handle(advance=finish)

    def reduce_scatter(
        self,
        buffer: Tensor,
        cuts: Cuts,
        *,
        into: Tensor | None = None,
        exact_sum: bool = True,
        tree: bool = False,
        each: Each | None = None,
    ) -> Handle:
        target = interval(buffer, cuts, self.rank) if into is None else into
        return self._reduce_scatter(self.number(), buffer, cuts, target, exact_sum, tree, each)

    def _reduce_scatter(
        self,
        call: int,
        buffer: Tensor,
        cuts: Cuts,
        target: Tensor,
        exact_sum: bool,
        tree: bool,
        each: Each | None,
    ) -> Handle:
        own, others = interval(buffer, cuts, self.rank), self._others
        scratch = self.borrow(own.numel() * len(others), own.dtype)
        rows = {rank: scratch[i * own.numel() :][: own.numel()] for i, rank in enumerate(others)}
        sends = {rank: interval(buffer, cuts, rank) for rank in others}
        received = self.exchange("reduce-scatter", call, sends, rows)

        def finish() -> None:
            received()
            rows[self.rank] = own
            in_order = [rows[rank] for rank in range(self.size)]
            sum_in_rank_order(in_order, target, exact_sum=exact_sum, tree=tree, each=each)
            self.give_back(scratch)

        return Handle(advance=finish)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._all_gather(self.number(), buffer, cuts)

    def _all_gather(self, call: int, buffer: Tensor, cuts: Cuts) -> Handle:
        own = interval(buffer, cuts, self.rank)
        receives = {rank: interval(buffer, cuts, rank) for rank in self._others}
        return Handle(self.exchange("all-gather", call, dict.fromkeys(receives, own), receives))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        is_source = self.rank == source
        sends = dict.fromkeys(self._others, buffer) if is_source else {}
        receives = {} if is_source else {source: buffer}
        return Handle(self.exchange("broadcast", self.number(), sends, receives))

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, row.numel()))
        rows[self.rank] = row
        buffer = rows.view(-1)
        self.all_gather(buffer, range(0, buffer.numel() + 1, row.numel())).wait()
        return rows

    def barrier(self) -> None:
        self.gather_rows(torch.zeros(1))

    def second_group(self) -> Collectives:
        return self.split([range(self.size)])

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(members: Sequence[int], group: dist.ProcessGroup) -> Collectives:
            place, roster = members.index(self.rank), self.roster.part(members)
            return Gloo(place, len(members), group, roster, self._timeout)

        return split(self.rank, self.roster, groups, "gloo", make, self._timeout)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        self._courier.close()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def number(self) -> int:
        """The number of this rank's next call, the same on all ranks."""
        self._calls += 1
        return self._calls

    def exchange(
        self, what: str, call: int, sends: dict[int, Tensor], receives: dict[int, Tensor]
    ) -> Callable[[], None]:
        """Start one message to and from every other rank (empty ones are not sent); returns what
        waits for them all."""
        works: list[tuple[int, dist.Work]] = []
        for peer, start, tensors in (
            ("group_src", dist.irecv, receives),
            ("group_dst", dist.isend, sends),
        ):
            for rank, tensor in tensors.items():
                if tensor.numel():
                    tag, to = _tag(what, call, tensor), {peer: rank}
                    with self._named(what, call, rank):
                        work = start(wire(tensor), group=self._group, tag=tag, **to)
                    assert work is not None
                    works.append((rank, work))
        self._unwaited[call] = works
        return partial(self._wait, what, call)

    def _wait(self, what: str, call: int) -> None:
        for rank, work in self._unwaited[call]:
            with self._named(what, call, rank):
                work.wait()
        del self._unwaited[call]

    @contextmanager
    def _named(self, what: str, call: int, other: int) -> Iterator[None]:
        """Turn a transport's error into one that says which call it was, and of which ranks."""
        try:
            yield
        except RuntimeError as error:
            told = self.roster.speaker(self.rank), f"{what} (call {call})"
            found = explain(error, *told, self.roster.named([other]))
            if isinstance(found, PeerLost):
                found = explain(error, *told, self.roster.named({other, *self._gone()}))
            raise found from error

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


def _tag(what: str, call: int, tensor: Tensor) -> int:
    """The tag of a message: its call's number, and what it is.

    So a rank that is in another collective, or sends another length, is waited for until the
    time-out says so; its message is never taken for what it is not.
    """
    kind = zlib.crc32(f"{what} {tensor.numel()} {tensor.dtype}".encode())
    return (call % 2**16) << 14 | kind % 2**14
