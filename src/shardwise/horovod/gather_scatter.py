"""Implements allgather, alltoall, broadcast and reducescatter, differentiable as in Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.allreduce import allreduce_
from shardwise.horovod.compression import Compression, Compressor, compressed
from shardwise.horovod.context import current
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.operations import (
    ReduceOp,
    as_group,
    check_dense,
    check_numbers,
    check_rows,
    only_result,
    submit,
    wait,
)
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> OperationHandle:
    """Return a handle to the concatenation of every rank's `tensor`, (rows of all ranks, ...).

    Accepts any dtype. Ranks may have different numbers of rows, including none.
    """
    check_rows("allgather", [tensor])
    return submit("allgather", [tensor], name, process_set, finish=only_result)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """Request the operation of `allgather_async` for several tensors at once."""
    check_rows("allgather", tensors := as_group("allgather", tensors))
    return submit("allgather", tensors, name, process_set)


class _Allgather(Function):
    """Differentiable allgather. Its gradient is the mean across ranks, as in Horovod."""

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
    """Concatenate every rank's `tensor` into (rows of all ranks, ...). Differentiable."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Run `allgather` for several tensors in one operation."""
    check_rows("allgather", tensors := as_group("allgather", tensors))
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """Return a handle to the rows that all ranks send to this one, in rank order. Any dtype.

    The first `splits[0]` rows of `tensor` (rows, ...) are sent to the first rank, and so on.
    Without `splits`, all ranks receive the same number of rows. With `splits`, there is a second
    result tensor: the number of rows from each rank (int32).
    """
    sizes = _sizes(tensor, splits, process_set)
    finish = only_result if splits is None else tuple
    return submit("alltoall", [tensor], name, process_set, splits=sizes, finish=finish)


def _sizes(tensor: Tensor, splits: Splits, process_set: ProcessSet) -> tuple[int, ...]:
    check_rows("alltoall", [tensor])
    rows, size = tensor.shape[0], process_set.size()
    if splits is None:
        if rows % size:
            raise BadCall(f"alltoall of {rows} rows over {size} ranks, unevenly: give splits.")
        return (rows // size,) * size
    given = splits.tolist() if isinstance(splits, Tensor) else [int(each) for each in splits]
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise BadCall(
            f"alltoall with splits {given} of {rows} rows over {size} ranks: give one number for "
            "each rank, and all of the rows."
        )
    return tuple(int(count) for count in given)


class _Alltoall(Function):
    """Differentiable alltoall. Gradients are sent back to the ranks that sent the rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        out, received = wait(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = wait(alltoall_async(grads[0], ctx.received, None, ctx.process_set))
        return back[0], None, None, None


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the rows that all ranks send to this one. Differentiable.

    With `splits`, the number of rows from each rank is returned too.
    """
    sizes = torch.tensor(_sizes(tensor, splits, process_set), dtype=torch.int32)
    out, received = _Alltoall.apply(tensor, sizes, name, process_set)  # type: ignore[no-untyped-call]
    return out if splits is None else (out, received)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """Return a handle to a new tensor with the values of rank `root_rank`.

    The tensor may have any dtype and must have the same shape on all ranks. `root_rank` is a global
    rank, not an index in the process set.
    """
    _check(tensor, root_rank, process_set)
    return submit("broadcast", [tensor], name, process_set, root=root_rank, finish=only_result)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """Broadcast `tensor` in place, and return a handle. See `broadcast_async`."""
    _check(tensor, root_rank, process_set)
    how: dict[str, Any] = {"root": root_rank, "in_place": True, "finish": lambda _: tensor}
    return submit("broadcast", [tensor], name, process_set, **how)


def _check(tensor: Tensor, root_rank: int, process_set: ProcessSet) -> None:
    check_dense("broadcast", [tensor])
    if root_rank not in process_set.ranks:
        raise BadCall(f"broadcast from rank {root_rank}, which is not in {process_set.ranks}.")


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Broadcast `tensor` in place, and return it. See `broadcast_async`."""
    return wait(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


class _Broadcast(Function):
    """Differentiable broadcast. The root gets the ranks' mean gradient, the others get zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return wait(broadcast_async(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = allreduce_(grads[0].clone(), op=ReduceOp.Average, process_set=ctx.process_set)
        is_root = current().world.rank == ctx.root_rank
        return mean if is_root else mean.zero_(), None, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a new tensor with the values of rank `root_rank`. Differentiable."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


def _submit_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scale: tuple[float, float],
    process_set: ProcessSet,
    **more: Any,
) -> OperationHandle:
    check_rows("reducescatter", tensors)
    check_numbers("reducescatter", tensors)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise BadCall(f"reducescatter takes hvd.Average or hvd.Sum, not {ReduceOp(op).name}.")
    current().reduces = True
    return submit("reducescatter", tensors, name, process_set, op=op.name, scale=scale, **more)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> OperationHandle:
    """Reduce every rank's `tensor` (rows, ...). Return a handle to this rank's rows of the result.

    Rows are divided evenly. If this is impossible, the first ranks get one additional row each.
    `op` is Average or Sum.
    """
    scale = prescale_factor, postscale_factor
    return _submit_reducescatter(
        [tensor], name, ReduceOp(op), scale, process_set, finish=only_result
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> OperationHandle:
    """Request the operation of `reducescatter_async` for several tensors at once."""
    scale = prescale_factor, postscale_factor
    return _submit_reducescatter(
        as_group("reducescatter", tensors), name, ReduceOp(op), scale, process_set
    )


class _Reducescatter(Function):
    """Differentiable reducescatter.

    Gradients are gathered. For a sum, they are multiplied by the number of ranks, as in Horovod.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        scale: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.op, ctx.factor, ctx.process_set = op, scale[0] * scale[1], process_set
        return tuple(wait(_submit_reducescatter(tensors, name, op, scale, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        times = ctx.factor * (ctx.process_set.size() if ctx.op == ReduceOp.Sum else 1)
        handles = [allgather_async(grad * times, None, ctx.process_set) for grad in grads]
        return None, None, None, None, *map(wait, handles)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce every rank's `tensor`, and return this rank's rows of the result. Differentiable."""
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *scale)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Run `reducescatter` for several tensors in one operation."""
    scale = prescale_factor, postscale_factor
    reduce = partial(_Reducescatter.apply, name, ReduceOp(op), scale, process_set)
    return compressed(compression, as_group("reducescatter", tensors), reduce)
