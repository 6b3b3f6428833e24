"""allreduce: reduces every rank's tensors to one, equal on all ranks.

allreduce        a new tensor, differentiable         allreduce_async     a handle to it
allreduce_       in place                             allreduce_async_    a handle to it
grouped_...      several tensors in one operation: it waits for all of them

All but allreduce and grouped_allreduce take the arguments of allreduce_async.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.compression import Compression, Compressor, compressed
from shardwise.horovod.context import current
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.operations import (
    ReduceOp,
    as_group,
    check_numbers,
    only_result,
    resolve_op,
    submit,
    wait,
)
from shardwise.horovod.process_sets import ProcessSet, global_process_set

F = TypeVar("F", bound=Callable[..., Any])


def _start(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **more: Any,
) -> OperationHandle:
    """Request the reduction of `tensors` in one operation."""
    op = resolve_op(op, average)
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
    scale = prescale_factor, postscale_factor
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
    factors = prescale_factor, postscale_factor
    return _start([tensor], average, name, op, *factors, process_set, finish=only_result)


def _with_arguments_of(shown: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function that passes its arguments on those of `shown`, also for help()."""

    def decorate(function: F) -> F:
        shared = inspect.signature(shown).parameters.values()
        parameters = [each for each in shared if each.kind is not each.VAR_KEYWORD]
        signature = inspect.signature(function).replace(parameters=parameters)

        @wraps(function)
        def checked(*given: Any, **named: Any) -> Any:
            # Raises TypeError before the operation is counted: ranks name operations by the count.
            signature.bind(*given, **named)
            return function(*given, **named)

        own: Any = checked
        own.__signature__ = signature
        return own  # type: ignore[no-any-return]

    return decorate


@_with_arguments_of(allreduce_async)
def allreduce_async_(tensor: Tensor, *how: Any, **named: Any) -> OperationHandle:
    """`allreduce_async` in place: the result is in `tensor`."""
    return _start([tensor], *how, **named, in_place=True, finish=lambda _: tensor)


@_with_arguments_of(allreduce_async)
def allreduce_(tensor: Tensor, *how: Any, **named: Any) -> Tensor:
    """Reduce in place, and wait."""
    return wait(allreduce_async_(tensor, *how, **named))  # type: ignore[no-any-return]


@_with_arguments_of(_start)
def grouped_allreduce_async(tensors: Sequence[Tensor], *how: Any, **named: Any) -> OperationHandle:
    """`allreduce_async` of several tensors in one operation. The result is a list."""
    return _start(as_group("allreduce", tensors), *how, **named)


@_with_arguments_of(_start)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *how: Any, **named: Any) -> OperationHandle:
    """`grouped_allreduce_async` in place."""
    group = as_group("allreduce", tensors)
    return _start(group, *how, **named, in_place=True, finish=lambda _: group)


@_with_arguments_of(_start)
def grouped_allreduce_(tensors: Sequence[Tensor], *how: Any, **named: Any) -> list[Tensor]:
    """Reduce several tensors in place, and wait."""
    return wait(grouped_allreduce_async_(tensors, *how, **named))  # type: ignore[no-any-return]


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
        ctx.how = op, *scale, process_set
        return tuple(wait(_start(tensors, None, name, *ctx.how)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *wait(_start(grads, None, None, *ctx.how))


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
