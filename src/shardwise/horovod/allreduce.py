"""allreduce: every rank's tensors become one, alike on all.

allreduce        a new tensor; gradients flow         allreduce_async     a handle to it
allreduce_       in place                             allreduce_async_    a handle to it
grouped_...      several tensors in one operation: all are ready, or none is
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.asking import ReduceOp, ask, check_numbers, chosen, several, single, wait
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
    check_numbers("allreduce", tensors)
    if op == ReduceOp.Adasum:
        _check_adasum(tensors, process_set)
    current().reduces = True
    return ask("allreduce", tensors, name, process_set, op=op.name, scale=scale, **more)


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    size = process_set.size()
    if size & (size - 1):
        raise BadCall(f"Adasum joins pairs of pairs: it takes 1, 2, 4, 8 ... ranks, not {size}.")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise BadCall("Adasum takes floating tensors: others have no direction.")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """A handle to the reduction of every rank's `tensor` of the same shape and dtype, a new tensor.

    `op` is hvd.Average without any; `average` is its older form. Values are multiplied by
    `prescale_factor` before and `postscale_factor` after. Whole numbers are cut off towards zero.
    """
    scale = prescale_factor, postscale_factor
    return _asked([tensor], name, chosen(op, average), scale, process_set, finish=single)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async` in place: the result is in `tensor`."""
    scale, op = (prescale_factor, postscale_factor), chosen(op, average)
    return _asked([tensor], name, op, scale, process_set, in_place=True, finish=lambda _: tensor)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce_async_`, waited for."""
    scale = prescale_factor, postscale_factor
    return wait(allreduce_async_(tensor, average, name, op, *scale, process_set))  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async` of several tensors in one operation; a list of new ones comes of it."""
    tensors, scale = several("allreduce", tensors), (prescale_factor, postscale_factor)
    return _asked(tensors, name, chosen(op, average), scale, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce_async` in place."""
    given, scale = several("allreduce", tensors), (prescale_factor, postscale_factor)
    op = chosen(op, average)
    return _asked(given, name, op, scale, process_set, in_place=True, finish=lambda _: given)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce_async_`, waited for."""
    scale = prescale_factor, postscale_factor
    return wait(grouped_allreduce_async_(tensors, average, name, op, *scale, process_set))  # type: ignore[no-any-return]


class _Allreduce(Function):
    """The gradient of a reduction is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        scale: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, scale, process_set
        return tuple(wait(_asked(tensors, name, op, scale, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *wait(_asked(grads, None, *ctx.how))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of every rank's `tensor`, a new one, through which gradients flow."""
    scale = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scale, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors in one operation."""
    scale = prescale_factor, postscale_factor
    reduce = partial(_Allreduce.apply, name, chosen(op, average), scale, process_set)
    return compressed(compression, several("allreduce", tensors), reduce)
