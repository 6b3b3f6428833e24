"""Implements allreduce, which reduces every rank's tensor to the same result on all ranks.

allreduce        a new tensor, differentiable         allreduce_async     a handle to it
allreduce_       in place                             allreduce_async_    a handle to it
grouped_...      several tensors in one operation, which starts when all of them are ready

All functions except allreduce and grouped_allreduce take the arguments of allreduce_async.
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
                "Adasum combines ranks in pairs, then pairs of pairs: it needs a power of two of "
                f"ranks, not {size}."
            )
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise BadCall("Adasum needs floating tensors, because it compares their directions.")
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
    """Request the reduction of every rank's tensor into a new tensor.

    Args:
        tensor: Dense tensor of the same shape and dtype on every rank.
        average: The older form of `op`: True for hvd.Average, False for hvd.Sum.
        name: Name of the operation, the same on all ranks (default: a number).
        op: hvd.Average (default), Sum, Min, Max, Product, or Adasum.
        prescale_factor: Factor applied to the values before the reduction.
        postscale_factor: Factor applied to the result. Integers are truncated towards zero.
        process_set: The ranks that take part.

    Returns:
        A handle for `hvd.poll` and `hvd.synchronize`.

    Raises:
        BadCall: If the tensors cannot be reduced by `op`.

    Example:
        ```python
        handle = hvd.allreduce_async(loss, name="loss")
        mean = hvd.synchronize(handle)
        ```
    """
    factors = prescale_factor, postscale_factor
    return _start([tensor], average, name, op, *factors, process_set, finish=only_result)


def _take_arguments_of(shown: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that copies the signature of `shown`, except for the first argument.

    This makes help() show the arguments of functions that accept `*args, **kwargs`.
    """

    def decorate(function: F) -> F:
        shared = inspect.signature(shown).parameters.values()
        parameters = [each for each in shared if each.kind is not each.VAR_KEYWORD]
        signature = inspect.signature(function).replace(parameters=parameters)

        @wraps(function)
        def checked(*given: Any, **named: Any) -> Any:
            # Raise TypeError before the operation is counted. Ranks name operations by the count,
            # so a failed call must not change it.
            signature.bind(*given, **named)
            return function(*given, **named)

        own: Any = checked
        own.__signature__ = signature
        return own  # type: ignore[no-any-return]

    return decorate


@_take_arguments_of(allreduce_async)
def allreduce_async_(tensor: Tensor, *how: Any, **named: Any) -> OperationHandle:
    """Request the reduction of every rank's tensor in place.

    Takes the arguments of `allreduce_async`.
    """
    return _start([tensor], *how, **named, in_place=True, finish=lambda _: tensor)


@_take_arguments_of(allreduce_async)
def allreduce_(tensor: Tensor, *how: Any, **named: Any) -> Tensor:
    """Reduce every rank's tensor in place, and return it.

    Takes the arguments of `allreduce_async`.
    """
    return wait(allreduce_async_(tensor, *how, **named))  # type: ignore[no-any-return]


@_take_arguments_of(_start)
def grouped_allreduce_async(tensors: Sequence[Tensor], *how: Any, **named: Any) -> OperationHandle:
    """Request the reduction of several tensors in one operation. The result is a list.

    Takes the other arguments of `allreduce_async`.
    """
    return _start(as_group("allreduce", tensors), *how, **named)


@_take_arguments_of(_start)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *how: Any, **named: Any) -> OperationHandle:
    """Request the reduction of several tensors in one operation, in place.

    Takes the other arguments of `allreduce_async`.
    """
    group = as_group("allreduce", tensors)
    return _start(group, *how, **named, in_place=True, finish=lambda _: group)


@_take_arguments_of(_start)
def grouped_allreduce_(tensors: Sequence[Tensor], *how: Any, **named: Any) -> list[Tensor]:
    """Reduce several tensors in one operation, in place, and return them.

    Takes the other arguments of `allreduce_async`.
    """
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
    """Reduce several tensors in one operation, and return new ones. Differentiable.

    Takes the other arguments of `allreduce`.
    """
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
    """Reduce every rank's tensor into a new tensor. Differentiable.

    Args:
        tensor: Dense tensor of the same shape and dtype on every rank.
        average: The older form of `op`: True for hvd.Average, False for hvd.Sum.
        name: Name of the operation, the same on all ranks (default: a number).
        compression: hvd.Compression.none, hvd.Compression.fp16, or your own class.
        op: hvd.Average (default), Sum, Min, Max, Product, or Adasum.
        prescale_factor: Factor applied to the values before the reduction.
        postscale_factor: Factor applied to the result. Integers are truncated towards zero.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same shape and dtype, identical on all ranks. Its gradient is the same
        reduction of the gradients.

    Raises:
        BadCall: If the tensors cannot be reduced by `op`.
        HorovodInternalError: If ranks request different operations under one name, or if a rank
            exits.

    Example:
        ```python
        hits = hvd.allreduce(torch.tensor(hits), name="hits", op=hvd.Sum)
        ```
    """
    scale = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scale, process_set)[0]
