"""The transport of CUDA ranks over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, GroupRanks, Handle, column
from shardwise.comm.ordered_sums import PLAIN, Sum, sum_in_tree
from shardwise.comm.torch_backend import explained, interval, real_view, split_group
from shardwise.layout.bucket_layout import even_cuts
from shardwise.watch.status_server import StatusServer

# torch 2.13 renamed these two, and warns of the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LARGE = 1 << 16
"""Elements from which an all-reduce of 16-bit floats is made of two calls in 16 bits, rather than
one in fp32: half the bytes, for one more message's time."""

NOTED = "a collective over NCCL, or the GPU's work before it"
"""What a hang report says of a rank that reads what a collective has brought."""


class Nccl(Collectives):
    """CUDA ranks over NCCL, by its own collectives.

    `wait()` makes the present stream wait for NCCL's; the host goes on.
    """

    name = "nccl"
    in_one_order = True

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        status_server: StatusServer | None = None,
        group_ranks: GroupRanks | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`group_ranks` says which ranks of the run these are, where they are not all.

        `timeout` bounds every wait of the groups that these are split into.
        """
        super().__init__(rank, size, status_server)
        self._device = device
        self._group = group
        self._group_ranks = group_ranks or GroupRanks.whole(size)
        self._timeout = timeout
        self._streams: dict[str, torch.cuda.Stream] = {}
        """Where this rank makes sums of its own, and from where it sends them."""

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        wide = how.wide(buffer.dtype)
        if how.in_tree or (wide != buffer.dtype and buffer.numel() >= LARGE):
            return self._own_all_reduce(buffer, how)
        summed = buffer.to(wide)
        work = dist.all_reduce(real_view(summed), group=self._group, async_op=True)

        def round_off() -> None:
            _used_here(summed)
            _rounded(how.scaled(summed), buffer)

        return self._handle(work, round_off)

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        target = interval(buffer, cuts, self.rank) if into is None else into
        if how.in_tree or how.wide(buffer.dtype) != buffer.dtype:
            return self._own_reduce_scatter(buffer, cuts, target, how)
        if _is_even(cuts):
            sums, sent = real_view(target), real_view(buffer)
            work = _scatter(sums, sent, group=self._group, async_op=True)
        else:
            parts = [real_view(interval(buffer, cuts, rank)) for rank in range(self.size)]
            work = dist.reduce_scatter(real_view(target), parts, group=self._group, async_op=True)
        return self._handle(work, lambda: how.scaled(target))

    def _own_reduce_scatter(self, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> _Summing:
        """Send each rank all rows of its interval, which it sums itself, beside the work.

        The order of NCCL's own sums depends on its algorithm. And 16-bit floats, which are summed
        in fp32, travel in 16 bits this way.
        """
        sent, out = real_view(buffer), real_view(target)
        pairs = sent.numel() // max(buffer.numel(), 1)
        lengths = [(b - a) * pairs for a, b in pairwise(cuts)]
        rows = sent.new_empty(self.size * out.numel())
        received = [out.numel()] * self.size
        work = dist.all_to_all_single(rows, sent, received, lengths, self._group, async_op=True)
        stream = self._stream_for("sums")
        with torch.cuda.stream(stream):
            # The work that comes after this call, backward mostly, need not wait for the messages.
            self._wait(work)
            _sum_rows(rows.view(self.size, -1), out, how)
            came: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            came.record()
        return _Summing(_SumUnderWay(came, rows, stream))

    def _stream_for(self, what: str) -> torch.cuda.Stream:
        if what not in self._streams:
            self._streams[what] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[what]

    def _own_all_reduce(self, buffer: Tensor, how: Sum) -> Handle:
        cuts = even_cuts(buffer.numel(), self.size)
        own = interval(buffer, cuts, self.rank)
        scatter = self._own_reduce_scatter(buffer, cuts, own, how)
        gathers: list[Handle] = []

        def advance() -> None:
            # Behind this sum alone: the work is in the middle of backward, and the next sum waits
            # for messages that came to NCCL before these.
            with torch.cuda.stream(self._stream_for("gathers")):
                scatter.await_()
                gathers.append(self.all_gather(buffer, cuts))

        def finish() -> None:
            scatter.wait()
            gathers[0].wait()

        return Handle(finish, advance)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        parts = [real_view(interval(buffer, cuts, rank)) for rank in range(self.size)]
        if _is_even(cuts):
            work = _gather(real_view(buffer), parts[self.rank], group=self._group, async_op=True)
        else:
            work = dist.all_gather(parts, parts[self.rank], group=self._group, async_op=True)
        return self._handle(work)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        work = dist.broadcast(real_view(buffer), group_src=source, group=self._group, async_op=True)
        return self._handle(work)

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        incoming, outgoing = column(counts, self.rank), list(counts[self.rank])
        work = dist.all_to_all_single(
            received, sent, incoming, outgoing, self._group, async_op=True
        )
        return self._handle(work)

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, row.numel()))
        _gather(rows.view(-1), row, group=self._group)
        return rows

    def barrier(self) -> None:
        self.read(self.gather_rows(torch.zeros(1, device=self._device)))

    def read(self, rows: Tensor) -> Tensor:
        # Of NCCL's calls the host knows nothing but that it waits: for all that have not come, or
        # for what this rank's own device is still to do before. An event would not tell these
        # apart, since the own work waits for the collectives before it.
        others = [rank for rank in self._group_ranks.ranks if rank != self.status_server.rank]
        with self.status_server.waits.noted(NOTED, lambda: others):
            return rows.cpu()

    def second_group(self) -> Collectives:
        return self.split([range(self.size)])

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(members: Sequence[int], group: dist.ProcessGroup) -> Collectives:
            place, group_ranks = members.index(self.rank), self._group_ranks.part(members)
            return Nccl(
                place,
                len(members),
                self._device,
                group,
                self.status_server,
                group_ranks,
                self._timeout,
            )

        part = split_group(self, self._group_ranks, groups, "nccl", make, self._timeout)
        # NCCL connects a group at its first collective, for which the host waits: now, while all
        # come to it in one order, and not with a message that the other rank is not ready for.
        part.barrier()
        return part

    @property
    def small_device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _handle(self, work: dist.Work | None, after: Callable[[], object] | None = None) -> Handle:
        assert work is not None

        def finish() -> None:
            self._wait(work)
            if after is not None:
                after()

        return _Working(work, finish)

    def _wait(self, work: dist.Work) -> None:
        """Let the present stream wait for a collective."""
        try:
            work.wait()
        except RuntimeError as error:
            speaker = self._group_ranks.speaker(self.rank)
            raise explained(error, speaker, "collective") from error


class _Working(Handle):
    """A call of NCCL, which knows without waiting whether the device has made it."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        self._work = work

    def is_there(self) -> bool:
        return super().is_there() or self._work.is_completed()


class _SumUnderWay:
    """A sum of `rows` that `stream` makes: `came` is the event of its end.

    The rows are held until somebody waits. Were they let go of at once, the allocator would have to
    be told of `stream`, and use their memory anew only when the device has come so far: the further
    the host runs ahead, the more memory the sums of a backward would take.
    """

    def __init__(self, came: Any, rows: Tensor, stream: torch.cuda.Stream) -> None:
        self.came = came
        self._rows: Tensor | None = rows
        self._stream = stream

    def await_(self) -> None:
        """Let the present stream wait for the sum."""
        torch.cuda.current_stream().wait_event(self.came)

    def end(self) -> None:
        """Wait, and let go of the rows."""
        self.await_()
        rows, self._rows = self._rows, None
        if rows is not None:
            _used_here(rows)

    def __del__(self) -> None:
        if self._rows is not None:  # nobody has waited
            self._rows.record_stream(self._stream)


class _Summing(Handle):
    """The handle of a sum on a stream of its own; apart from it, so that neither holds the other
    in a circle that only the garbage collector ends."""

    def __init__(self, under_way: _SumUnderWay) -> None:
        super().__init__(under_way.end)
        self._under_way = under_way

    def await_(self) -> None:
        """Let the present stream wait for the sum, which is waited for once more."""
        self._under_way.await_()

    def is_there(self) -> bool:
        return super().is_there() or bool(self._under_way.came.query())


def _used_here(made: Tensor) -> None:
    """Tell the allocator that the present stream uses `made`, which may be of another one: freed
    there, its memory would be used anew while this stream still reads it. Whoever waits for a sum
    need not do so on the stream that has asked for it. On that one this does nothing."""
    made.record_stream(torch.cuda.current_stream())


def _sum_rows(rows: Tensor, out: Tensor, how: Sum) -> None:
    """out = the sum of `rows`, (ranks, numbers), in one kernel but for the tree."""
    wide = how.wide(rows.dtype)
    if how.in_tree:
        sum_in_tree(list(rows), out, wide, how.scale)
    else:
        out.copy_(how.scaled(rows.sum(0, dtype=wide)))


def _rounded(total: Tensor, out: Tensor) -> None:
    if total is not out:
        out.copy_(total)


def _is_even(cuts: Cuts) -> bool:
    return len({b - a for a, b in pairwise(cuts)}) == 1
