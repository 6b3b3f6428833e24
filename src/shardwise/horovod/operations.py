"""Requests operations, after checking their names and tensors, and waits for their results.

submit ─▶ OperationHandle ─▶ the communication thread (background.py) ─▶ succeed or fail
wait   ◀── the result, in the form of the input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import BadCall
from shardwise.horovod.context import current
from shardwise.horovod.coordinator import OperationRequest
from shardwise.horovod.operation_handle import OperationHandle

if TYPE_CHECKING:
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
    """Return whether an operation is done. If so, `synchronize` does not wait.

    Args:
        handle: The result of a function whose name ends with `_async` or `_async_`.
    """
    return handle.is_done


def resolve_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return `op`, or the op that the older argument `average` selects (default: hvd.Average).

    Raises BadCall if both are given.
    """
    if op is not None and average is not None:
        raise BadCall("op and average both select the reduction: pass only op.")
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
    """Request an operation, and return its handle immediately.

    Operations without a `name` are numbered, so ranks that make the same calls use the same names.
    """
    context = current()
    number = process_set.number()
    if not process_set.included():
        raise BadCall(
            f"Rank {context.world.rank} called {kind} on {process_set}, to which it does not "
            "belong: call it only if process_set.included()."
        )
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
        scale=(float(scale[0]), float(scale[1])),  # NumPy scalars are not JSON
        root=int(root),
        **more,
    )
    handle = handle_type(request, tensors, in_place=in_place, finish=finish)
    return context.background.submit(handle)


def wait(handle: OperationHandle) -> Any:
    """Wait for an operation and return its result.

    Args:
        handle: The result of a function whose name ends with `_async` or `_async_`.

    Returns:
        The result in the form of the input: a tensor, or a list for a grouped operation.

    Raises:
        HorovodInternalError: If ranks request different operations under one name, or if a rank
            exits.

    Example:
        ```python
        handle = hvd.allreduce_async(loss, name="loss")
        mean = hvd.synchronize(handle)
        ```
    """
    return handle.wait(current().background.timeout)


def only_result(results: Sequence[Tensor]) -> Tensor:
    """Return the result of an operation on a single tensor."""
    return results[0]


def as_group(kind: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors` as a list. Raises BadCall if there are none."""
    found = list(tensors)
    if not found:
        raise BadCall(f"a grouped {kind} has no tensors: pass at least one.")
    return found


def check_numbers(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise BadCall if a tensor cannot be summed."""
    check_dense(kind, tensors)
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            raise BadCall(f"{kind} cannot sum booleans: convert them with tensor.int().")


def check_rows(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise BadCall if a tensor has no dimensions."""
    check_dense(kind, tensors)
    for tensor in tensors:
        if not tensor.ndim:
            raise BadCall(
                f"{kind} of a scalar is not possible, because it has no rows: write tensor.view(1)."
            )


def check_dense(kind: str, tensors: Sequence[Tensor]) -> None:
    """Raise BadCall if a tensor is sparse."""
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise BadCall(
            f"{kind} of a sparse tensor: convert it with tensor.to_dense(), or reduce it with "
            "hvd.sparse_allreduce_async."
        )
