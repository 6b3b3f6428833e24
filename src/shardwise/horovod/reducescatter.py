"""reducescatter: every rank's tensors become one, of which each rank gets some rows.

As even as can be; the first ranks get one more. The sum or the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.allgather import allgather_async
from shardwise.horovod.asking import (
    ReduceOp,
    ask,
    check_numbers,
    check_rows,
    several,
    single,
    wait,
)
from shardwise.horovod.compression import Compression, Compressor, compressed
from shardwise.horovod.context import current
from shardwise.horovod.handles import Handle
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def _asked(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scale: tuple[float, float],
    process_set: ProcessSet,
    **more: Any,
) -> Handle:
    check_rows("reducescatter", tensors)
    check_numbers("reducescatter", tensors)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise BadCall(f"reducescatter takes hvd.Average or hvd.Sum, not {ReduceOp(op).name}.")
    current().reduces = True
    return ask("reducescatter", tensors, name, process_set, op=op.name, scale=scale, **more)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """A handle to this rank's rows of the reduction of every rank's `tensor`, (rows, ...)."""
    scale = prescale_factor, postscale_factor
    return _asked([tensor], name, ReduceOp(op), scale, process_set, finish=single)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter_async` of several tensors in one operation."""
    scale = prescale_factor, postscale_factor
    return _asked(several("reducescatter", tensors), name, ReduceOp(op), scale, process_set)


class _Reducescatter(Function):
    """Gradients are gathered; those of a sum count as often as there are ranks, as in Horovod."""

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
        return tuple(wait(_asked(tensors, name, op, scale, process_set)))

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
    """This rank's rows of the reduction of every rank's `tensor`; gradients flow."""
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
    """`reducescatter` of several tensors in one operation."""
    scale = prescale_factor, postscale_factor
    reduce = partial(_Reducescatter.apply, name, ReduceOp(op), scale, process_set)
    return compressed(compression, several("reducescatter", tensors), reduce)
