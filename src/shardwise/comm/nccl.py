"""Transport for CUDA ranks over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, GroupRanks, Handle, column, interval
from shardwise.comm.ordered_sums import PLAIN, Sum, sum_in_tree
from shardwise.comm.torch_backend import explain, real_view, split_group
from shardwise.layout.bucket_layout import even_cuts
from shardwise.watch.status_server import StatusServer

# torch 2.13 renamed these two functions, and warns about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LARGE = 1 << 16
"""Minimum number of elements for which a 16-bit all-reduce uses two calls in 16 bits.

Smaller buffers use one call in fp32. Two calls send half as many bytes, but add the latency of one
message.
"""

NOTED = "a collective over NCCL, or the GPU's work before it"
"""Name that hang reports use for waiting for a collective's result."""


def abort_communicators(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the NCCL communicators of torch's process groups. Their kernels end at once.

    Raises the first error only after it has tried to abort all of them.
    """
    backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups]
    errors: list[RuntimeError] = []
    # In one NCCL group, because separate aborts of several communicators may wait for each other.
    calls = [backend.abort for backend in backends]
    for call in (backends[0]._group_start, *calls, backends[0]._group_end):
        try:
            call()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Nccl(Collectives):
    """CUDA ranks that use NCCL's collectives.

    `wait()` makes the current stream wait for NCCL's stream. The host does not block.
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
        """Create a transport over the torch process group `group` (None: the default group).

        `group_ranks` maps this group's ranks to ranks in the run, if the run also has other ranks.
        `timeout` limits waits in the groups that `split` creates.
        """
        super().__init__(rank, size, status_server)
        self._device = device
        self._group = group
        self._group_ranks = group_ranks or GroupRanks.whole(size)
        self._timeout = timeout
        self._streams: dict[str, torch.cuda.Stream] = {}
        """Streams for this rank's own sums, and for the gathers that send them."""

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        # This rank computes tree sums and fp32 sums of 16-bit floats itself, because NCCL chooses
        # its own order and would round after every addition.
        wide = how.wide(buffer.dtype)
        if how.in_tree or (wide != buffer.dtype and buffer.numel() >= LARGE):
            return self._own_all_reduce(buffer, how)
        summed = buffer.to(wide)
        work = dist.all_reduce(real_view(summed), group=self._group, async_op=True)

        def round_off() -> None:
            _used_here(summed)
            how.scaled(summed)
            if summed is not buffer:  # `to` returned a copy in the wider dtype: round it once
                buffer.copy_(summed)

        return self._handle(work, round_off)

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        target = interval(buffer, cuts, self.rank) if into is None else into
        if how.in_tree or how.wide(buffer.dtype) != buffer.dtype:
            return self._own_reduce_scatter(buffer, cuts, target, how)
        # torch copies nothing for a single tensor, but may copy for a list of parts.
        if _is_even(cuts):
            sums, sent = real_view(target), real_view(buffer)
            work = _scatter(sums, sent, group=self._group, async_op=True)
        else:
            parts = [real_view(interval(buffer, cuts, rank)) for rank in range(self.size)]
            work = dist.reduce_scatter(real_view(target), parts, group=self._group, async_op=True)
        return self._handle(work, lambda: how.scaled(target))

    def _own_reduce_scatter(self, buffer: Tensor, cuts: Cuts, target: Tensor, how: Sum) -> _Summing:
        """Exchange intervals and sum them on this rank, in parallel with the backward pass.

        The order of NCCL's own sums depends on its algorithm. Here the order is fixed, and 16-bit
        floats that are summed in fp32 are sent in 16 bits.
        """
        sent, out = real_view(buffer), real_view(target)
        pairs = sent.numel() // max(buffer.numel(), 1)
        lengths = [(b - a) * pairs for a, b in pairwise(cuts)]
        rows = sent.new_empty(self.size * out.numel())
        received = [out.numel()] * self.size
        work = dist.all_to_all_single(rows, sent, received, lengths, self._group, async_op=True)
        stream = self._stream_for("sums")
        with torch.cuda.stream(stream):
            # Wait on this stream, so that later work on the current stream (usually backward) does
            # not wait for the messages.
            self._wait(work)
            terms, wide = rows.view(self.size, -1), how.wide(rows.dtype)  # (ranks, elements)
            if how.in_tree:
                sum_in_tree(list(terms), out, wide, how.scale)
            else:  # in a single kernel
                out.copy_(how.scaled(terms.sum(0, dtype=wide)))
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _Summing(_SumUnderWay(event, rows, stream))

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
            # Use a third stream, which waits only for this sum. The current stream is in the middle
            # of backward, and the stream of sums may already wait for the messages of the next sum.
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

    def read(self, rows: Tensor) -> Tensor:
        with self._noted():
            return rows.cpu()

    def wait_for(self, event: Any) -> None:
        with self._noted():
            event.synchronize()

    def _noted(self) -> AbstractContextManager[None]:
        # The host cannot tell whether it waits for the other ranks or for earlier work of its own
        # device. An event could not distinguish these, because that work itself waits for earlier
        # collectives.
        others = [rank for rank in self._group_ranks.ranks if rank != self.status_server.rank]
        return self.status_server.waits.noted(NOTED, lambda: others)

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
        # NCCL connects a group at its first collective, and the host waits for that. Connect now,
        # while all ranks make this call in the same order, and not in the middle of a step.
        part.barrier()
        return part

    @property
    def small_device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def forget(self) -> None:
        """Drop the reference to torch's process group, which is closed elsewhere."""
        self._group = None

    def _handle(self, work: dist.Work | None, after: Callable[[], object] | None = None) -> Handle:
        assert work is not None

        def finish() -> None:
            self._wait(work)
            if after is not None:
                after()

        return _Working(work, finish)

    def _wait(self, work: dist.Work) -> None:
        """Make the current stream wait for a collective."""
        try:
            work.wait()
        except RuntimeError as error:
            speaker = self._group_ranks.speaker(self.rank)
            raise explain(error, speaker, "collective") from error


class _Working(Handle):
    """Handle of an NCCL call. It can test, without waiting, whether the device has finished."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        self._work = work

    def is_there(self) -> bool:
        return super().is_there() or self._work.is_completed()


class _SumUnderWay:
    """A pending sum of `rows` on `stream`. `event` marks its completion."""

    # Hold the rows until a wait. If they were freed immediately, the allocator would need
    # `record_stream`, and would reuse their memory only when the device reaches that point. The
    # further the host runs ahead, the more memory the sums of a backward pass would use.

    def __init__(self, event: Any, rows: Tensor, stream: torch.cuda.Stream) -> None:
        self.event = event
        self._rows: Tensor | None = rows
        self._stream = stream

    def await_(self) -> None:
        """Make the current stream wait for the sum."""
        torch.cuda.current_stream().wait_event(self.event)

    def end(self) -> None:
        """Make the current stream wait for the sum, and free the rows."""
        self.await_()
        rows, self._rows = self._rows, None
        if rows is not None:
            _used_here(rows)

    def __del__(self) -> None:
        if self._rows is not None:  # nobody waited, so the stream may still read them
            self._rows.record_stream(self._stream)


class _Summing(Handle):
    """Handle of a sum on a separate stream."""

    # The sum is a separate class, because otherwise `finish` would refer to the handle itself, and
    # such a reference cycle would keep the rows alive until the garbage collector runs.

    def __init__(self, under_way: _SumUnderWay) -> None:
        super().__init__(under_way.end)
        self._under_way = under_way

    def await_(self) -> None:
        """Make the current stream wait for the sum. Only `wait` frees the rows."""
        self._under_way.await_()

    def is_there(self) -> bool:
        return super().is_there() or bool(self._under_way.event.query())


def _used_here(made: Tensor) -> None:
    """Tell the allocator that the current stream uses `made`."""
    # A sum may be waited for on a different stream from the one it was allocated on. Without this
    # call, its memory could be reused while this stream still reads it. On the same stream this is
    # a no-op.
    made.record_stream(torch.cuda.current_stream())


def _is_even(cuts: Cuts) -> bool:
    return len({b - a for a, b in pairwise(cuts)}) == 1
