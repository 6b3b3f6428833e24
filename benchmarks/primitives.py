"""The operations that collectives.py times, each written as a step of it would be."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import Collectives, Gloo
from shardwise.comm.same_host import share_memory

Operation = Callable[[], object]

SMALL = 4096
"""Bytes of a small message."""

# torch 2.13 renamed these; the older names are all that older ones have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def large(numel: int, rank: int, size: int) -> dict[str, Operation]:
    """Operations on a whole buffer of `numel` fp32 elements; `size` divides it."""
    # Written to, not only allocated: reading pages that were never touched costs nothing.
    whole, other = torch.ones(numel), torch.ones(numel)
    part = torch.ones(numel // size)
    buffer = torch.zeros(numel).fill_(0.0)
    return {
        "memcpy": lambda: other.copy_(whole),
        "all_reduce": lambda: dist.all_reduce(buffer),
        "reduce_scatter_single": lambda: reduce_scatter(part, whole),
        "all_to_all_single + sum": lambda: _all_to_all(whole, other, part, size),
        "isend/irecv exchange + sum": lambda: _exchange(whole, other, part, rank),
        "all_gather_single": lambda: all_gather(whole, part),
        "n asynchronous broadcasts": lambda: _broadcasts(whole),
    }


def small() -> dict[str, Operation]:
    """Operations whose cost is the message itself, not its bytes."""
    row = torch.zeros(SMALL // 4)
    return {
        "4 KB all_reduce": lambda: dist.all_reduce(row),
        "barrier": dist.barrier,
    }


def ours(numel: int, rank: int, size: int) -> dict[str, Operation]:
    """The same verbs through Shardwise's seam, over each transport; `size` divides `numel`."""
    gloo = Gloo(rank, size)
    operations = _verbs("Gloo", gloo, numel)
    if sys.platform == "linux":
        operations |= _verbs("Shared", share_memory(gloo, timeout=60, required=True), numel)
    return operations


def _verbs(name: str, group: Collectives, numel: int) -> dict[str, Operation]:
    buffer = group.allocate(numel, torch.float32, torch.device("cpu")).fill_(0.0)
    row = torch.zeros(SMALL // 4)
    cuts = range(0, numel + 1, numel // group.size)
    return {
        f"{name}.all_reduce": lambda: group.all_reduce(buffer).reusable(),
        f"{name}.reduce_scatter": lambda: group.reduce_scatter(buffer, cuts).reusable(),
        f"{name}.all_gather": lambda: group.all_gather(buffer, cuts).reusable(),
        f"{name}.gather_rows, 4 KB": lambda: group.gather_rows(row),
        f"{name}.barrier": group.barrier,
    }


def _all_to_all(whole: Tensor, received: Tensor, out: Tensor, size: int) -> None:
    """A reduce-scatter: everyone sends everyone its interval, and sums what came in."""
    dist.all_to_all_single(received, whole)
    torch.sum(received.view(size, -1), dim=0, out=out)


def _exchange(whole: Tensor, received: Tensor, out: Tensor, rank: int) -> None:
    """The same by point-to-point messages, all in flight at once."""
    theirs, mine = received.split(out.numel()), whole.split(out.numel())
    others = [other for other in range(len(mine)) if other != rank]
    works = [dist.irecv(theirs[other], other) for other in others]
    works += [dist.isend(mine[other], other) for other in others]
    for work in works:
        work.wait()
    out.copy_(mine[rank])
    for other in others:
        out.add_(theirs[other])


def _broadcasts(whole: Tensor) -> None:
    """An all-gather: everyone broadcasts its interval, all in flight at once."""
    parts = whole.chunk(dist.get_world_size())
    works = [dist.broadcast(part, source, async_op=True) for source, part in enumerate(parts)]
    for work in works:
        work.wait()
