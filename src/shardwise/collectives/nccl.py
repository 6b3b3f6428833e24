"""CUDA ranks over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.base import Collectives, Cuts, Handle
from shardwise.collectives.wire import explain, interval, split, widened, wire


class Nccl(Collectives):
    """CUDA ranks over NCCL, by its own collectives; `wait()` orders its stream and ours."""

    name = "nccl"

    def __init__(
        self, rank: int, size: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, size)
        self._device = device
        self._group = group

    def all_reduce(self, buffer: Tensor, *, exact_sum: bool = True) -> Handle:
        wide = widened(buffer, exact_sum)
        work = dist.all_reduce(wire(wide), group=self._group, async_op=True)
        return self._handle(work, None if wide is buffer else partial(buffer.copy_, wide))

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, *, into: Tensor | None = None, exact_sum: bool = True
    ) -> Handle:
        wide = widened(buffer, exact_sum)
        target = interval(buffer, cuts, self.rank) if into is None else into
        out = target if wide is buffer else interval(wide, cuts, self.rank)
        if _is_even(cuts):
            work = dist.reduce_scatter_tensor(
                wire(out), wire(wide), group=self._group, async_op=True
            )
        else:
            parts = [wire(interval(wide, cuts, rank)) for rank in range(self.size)]
            work = dist.reduce_scatter(wire(out), parts, group=self._group, async_op=True)
        return self._handle(work, None if out is target else partial(target.copy_, out))

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        parts = [wire(interval(buffer, cuts, rank)) for rank in range(self.size)]
        if _is_even(cuts):
            work = dist.all_gather_into_tensor(
                wire(buffer), parts[self.rank], group=self._group, async_op=True
            )
        else:
            work = dist.all_gather(parts, parts[self.rank], group=self._group, async_op=True)
        return self._handle(work)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        work = dist.broadcast(wire(buffer), group_src=source, group=self._group, async_op=True)
        return self._handle(work)

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, row.numel()))
        dist.all_gather_into_tensor(rows.view(-1), row, group=self._group)
        return rows

    def barrier(self) -> None:
        self.gather_rows(torch.zeros(1, device=self._device)).cpu()

    def second_group(self) -> Collectives:
        return Nccl(self.rank, self.size, self._device, dist.new_group(backend="nccl"))

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        def make(rank: int, size: int, group: dist.ProcessGroup) -> Collectives:
            return Nccl(rank, size, self._device, group)

        return split(self.rank, self.size, groups, "nccl", make)

    @property
    def small_device(self) -> torch.device:
        return self._device

    def close(self) -> None:
        dist.destroy_process_group()

    def _handle(self, work: dist.Work | None, after: Callable[[], object] | None = None) -> Handle:
        assert work is not None

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise explain(error, self.rank, self.size, "collective") from error
            if after is not None:
                after()

        return Handle(finish)


def _is_even(cuts: Cuts) -> bool:
    return len({b - a for a, b in pairwise(cuts)}) == 1
