"""allreduce: reduces every rank's tensors to one, equal on all ranks.

allreduce        a new tensor, differentiable         allreduce_async     a handle to it
allreduce_       in place                             allreduce_async_    a handle to it
grouped_...      several tensors in one operation: it waits for all of them
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.compression import Compression, Compressor, compressed
from shardwise.horovod.context import current
from shardwise.horovod.operations import (
    OperationHandle,
    ReduceOp,
    as_group,
    check_numbers,
    only_result,
    resolve_op,
    submit,
    wait,
)
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def _submit_allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scale: tuple[float, float],
    process_set: ProcessSet,
    **more: Any,
) -> OperationHandle:
    check_numbers("allreduce", tensors)
    if op == ReduceOp.Adasum:
        size = process_set.size()
        if size & (size - 1):
            raise BadCall(
                f"Adasum joins pairs of pairs: it takes 1, 2, 4, 8 ... ranks, not {size}."
            )
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise BadCall("Adasum takes floating tensors: others have no direction.")
    current().reduces = True
    return submit("allreduce", tensors, name, process_set, op=op.name, scale=scale, **more)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """Return a handle to the reduction of every rank's `tensor`, which is a new tensor.

    All tensors have one shape and dtype. `op` is hvd.Average by default; `average` is its older
    form. Values are multiplied by `prescale_factor` before and `postscale_factor` after the
    reduction. Integers are truncated towards zero.
    """
    scale = prescale_factor, postscale_factor
    return _submit_allreduce(
        [tensor], name, resolve_op(op, average), scale, process_set, finish=only_result
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """`allreduce_async` in place: the result is in `tensor`."""
    scale, op = (prescale_factor, postscale_factor), resolve_op(op, average)
    return _submit_allreduce(
        [tensor], name, op, scale, process_set, in_place=True, finish=lambda _: tensor
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce in place, and wait."""
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
) -> OperationHandle:
    """`allreduce_async` of several tensors in one operation. The result is a list."""
    tensors, scale = as_group("allreduce", tensors), (prescale_factor, postscale_factor)
    return _submit_allreduce(tensors, name, resolve_op(op, average), scale, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> OperationHandle:
    """`grouped_allreduce_async` in place."""
    given, scale = as_group("allreduce", tensors), (prescale_factor, postscale_factor)
    op = resolve_op(op, average)
    return _submit_allreduce(
        given, name, op, scale, process_set, in_place=True, finish=lambda _: given
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, and wait."""
    scale = prescale_factor, postscale_factor
    return wait(grouped_allreduce_async_(tensors, average, name, op, *scale, process_set))  # type: ignore[no-any-return]


class _Allreduce(Function):
    """Differentiable allreduce. Its gradient is the same reduction of the gradients."""

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
        return tuple(wait(_submit_allreduce(tensors, name, op, scale, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *wait(_submit_allreduce(grads, None, *ctx.how))


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
    """Reduce every rank's `tensor` to a new one. Differentiable."""
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
    reduce = partial(_Allreduce.apply, name, resolve_op(op, average), scale, process_set)
    return compressed(compression, as_group("allreduce", tensors), reduce)
