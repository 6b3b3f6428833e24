"""alltoall: each rank sends some of its rows to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.asking import ask, check_rows, single, wait
from shardwise.horovod.handles import Handle
from shardwise.horovod.process_sets import ProcessSet, global_process_set

Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """A handle to the rows that all ranks send to this one, in rank order; any dtype.

    `tensor` is (rows, ...); its first `splits[0]` rows go to the first rank, and so on; without
    `splits` as many to each. With it, how many rows came from each rank (int32) comes too.
    """
    sizes = _sizes(tensor, splits, process_set)
    finish = single if splits is None else tuple
    return ask("alltoall", [tensor], name, process_set, splits=sizes, finish=finish)


def _sizes(tensor: Tensor, splits: Splits, process_set: ProcessSet) -> tuple[int, ...]:
    check_rows("alltoall", [tensor])
    rows, size = tensor.shape[0], process_set.size()
    if splits is None:
        if rows % size:
            raise BadCall(f"alltoall of {rows} rows over {size} ranks, unevenly: give splits.")
        return (rows // size,) * size
    given = splits.tolist() if isinstance(splits, Tensor) else list(splits)
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise BadCall(
            f"alltoall with splits {given} of {rows} rows over {size} ranks: give one number for "
            "each rank, and all of the rows."
        )
    return tuple(int(count) for count in given)


class _Alltoall(Function):
    """Gradients go back where the rows came from."""

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
    """The rows that all ranks send to this one; with `splits`, and how many from each.

    Gradients flow.
    """
    sizes = torch.tensor(_sizes(tensor, splits, process_set), dtype=torch.int32)
    out, received = _Alltoall.apply(tensor, sizes, name, process_set)  # type: ignore[no-untyped-call]
    return out if splits is None else (out, received)
