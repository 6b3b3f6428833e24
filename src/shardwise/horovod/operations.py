"""Requests operations for a caller: names, checks, the request, and the handle to wait on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import BadCall
from shardwise.horovod.context import current
from shardwise.horovod.coordinator import OperationRequest
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.process_sets import ProcessSet


class ReduceOp(IntEnum):
    """How the values of all ranks are reduced."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def poll(handle: OperationHandle) -> bool:
    """Whether the operation of `handle` is done, so that `synchronize` would not wait."""
    return handle.is_done


def resolve_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """`op`, or the meaning of the older `average`; hvd.Average without either. Raises BadCall for
    both."""
    if op is not None and average is not None:
        raise BadCall("op says what average says too: give op alone.")
    if op is not None:
        return ReduceOp(op)
    return ReduceOp.Sum if average is False else ReduceOp.Average


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    finish: Callable[[Any], Any] | None = None,
    handle_type: type[OperationHandle] = OperationHandle,
    note: Mapping[str, str] | None = None,
    scale: tuple[float, float] = (1.0, 1.0),
    root: int = 0,
    **more: Any,
) -> OperationHandle:
    """Request an operation, and return its handle at once. Operations without a `name` are counted,
    so that ranks that make the same calls mean the same ones."""
    context = current()
    number = process_set.number()
    if not process_set.included():
        raise BadCall(f"{kind} on {process_set}, which rank {context.world.rank} is not in.")
    if name is None:
        counted = f"{kind}.noname.{number}"
        name = f"{counted}.{context.counters[counted]}"
        context.counters[counted] += 1
    request = OperationRequest(
        name=str(name),
        kind=kind,
        process_set=number,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        note=note or {},
        scale=(float(scale[0]), float(scale[1])),  # numpy's numbers are not JSON
        root=int(root),
        **more,
    )
    handle = handle_type(request, tensors, in_place=in_place, finish=finish)
    return context.background.submit(handle)


def wait(handle: OperationHandle) -> Any:
    """Wait for an operation and return its result, in the form of its input.

    Raises HorovodInternalError where ranks disagree on it, or one is gone.
    """
    return handle.wait(current().background.timeout)


def only_result(results: Sequence[Tensor]) -> Tensor:
    """The result of an operation on one tensor."""
    return results[0]


def as_group(kind: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A group of tensors as a list. Raises BadCall for an empty one."""
    found = list(tensors)
    if not found:
        raise BadCall(f"a grouped {kind} of no tensors: give one at least.")
    return found


def check_numbers(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise BadCall for tensors that cannot be summed."""
    for tensor in tensors:
        check_dense(kind, tensor)
        if tensor.dtype == torch.bool:
            raise BadCall(f"{kind} of truth values, which have no sum: convert with tensor.int().")


def check_rows(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise BadCall for tensors without a first dimension."""
    for tensor in tensors:
        check_dense(kind, tensor)
        if not tensor.ndim:
            raise BadCall(f"{kind} of a scalar, which has no rows: reshape it, tensor.view(1).")


def check_dense(kind: str, tensor: Tensor) -> None:
    """Raise BadCall for a sparse tensor."""
    if tensor.layout != torch.strided:
        raise BadCall(
            f"{kind} of a sparse tensor: convert it with tensor.to_dense(), or reduce it with "
            "hvd.sparse_allreduce_async."
        )
