"""allgather: the rows of all ranks, one after the other, on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.horovod.allreduce import allreduce_
from shardwise.horovod.asking import ReduceOp, ask, check_rows, several, single, wait
from shardwise.horovod.handles import Handle
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """A handle to (rows of all ranks, ...) of every rank's `tensor`, (rows, ...), any dtype.

    Ranks may have different numbers of rows, also none.
    """
    check_rows("allgather", [tensor])
    return ask("allgather", [tensor], name, process_set, finish=single)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allgather_async` of several tensors in one operation."""
    check_rows("allgather", tensors := several("allgather", tensors))
    return ask("allgather", tensors, name, process_set)


class _Allgather(Function):
    """Each rank's rows get the mean of what all ranks have as their gradient, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(wait(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mine = torch.tensor([ctx.rows])
        rows = wait(allgather_async(mine, None, ctx.process_set))
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        found = []
        for grad, start, count in zip(grads, starts, ctx.rows, strict=True):
            mean = allreduce_(grad.clone(), op=ReduceOp.Average, process_set=ctx.process_set)
            found.append(mean[start : start + count])
        return None, None, *found


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """(rows of all ranks, ...) of every rank's `tensor`; gradients flow."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allgather` of several tensors in one operation."""
    check_rows("allgather", tensors := several("allgather", tensors))
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
