"""broadcast: one rank's tensor, on all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from shardwise.errors import BadCall
from shardwise.horovod.allreduce import allreduce_
from shardwise.horovod.asking import ReduceOp, ask, check_dense, single, wait
from shardwise.horovod.context import current
from shardwise.horovod.handles import Handle
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """A handle to a new tensor with the values of rank `root_rank`'s; any dtype, one shape.

    `root_rank` counts the ranks of the run, whatever the process set.
    """
    _check(tensor, root_rank, process_set)
    return ask("broadcast", [tensor], name, process_set, root=root_rank, finish=single)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`broadcast_async` in place."""
    _check(tensor, root_rank, process_set)
    how: dict[str, Any] = {"root": root_rank, "in_place": True, "finish": lambda _: tensor}
    return ask("broadcast", [tensor], name, process_set, **how)


def _check(tensor: Tensor, root_rank: int, process_set: ProcessSet) -> None:
    check_dense("broadcast", tensor)
    if root_rank not in process_set.ranks:
        raise BadCall(f"broadcast from rank {root_rank}, which is not in {process_set.ranks}.")


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast_async_`, waited for."""
    return wait(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


class _Broadcast(Function):
    """The root's tensor gets the mean of all ranks' gradients, the others' get zeros."""

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
    """A new tensor with the values of rank `root_rank`'s; gradients flow."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]
