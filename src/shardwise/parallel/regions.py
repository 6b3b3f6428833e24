"""Where the ranks of a replica go apart and come together, in forward and in backward.

Between the two each rank has a part of an activation; outside all have the same. What is a copy in
one direction is a sum in the other (f and g of Megatron-LM, Shoeybi et al., 2019):

                 forward                backward
    apart        as it is               summed over the ranks
    together     summed                 as it is
    gathered     parts joined           this rank's part
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.collectives import Collectives
from shardwise.shards import Range


def is_stand_in(value: Tensor) -> bool:
    """Whether `value` has a shape and no numbers, so that there is nothing to tell other ranks."""
    return isinstance(value, FakeTensor)


def summed(value: Tensor, group: Collectives) -> Tensor:
    """`value` (any shape) summed over the ranks of `group`, in memory of its own; the same bits on
    all of them."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if is_stand_in(value):
        return total
    group.all_reduce(total.view(-1)).wait()
    return total


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.group), None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives) -> Tensor:
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives, ranges: Sequence[Range]) -> Tensor:
        ctx.range = ranges[group.rank]
        lead = value.shape[:-1].numel()
        edges = [0, *(lead * end for _, end in ranges)]
        flat = value.new_empty(edges[-1])
        flat[edges[group.rank] : edges[group.rank + 1]] = value.detach().reshape(-1)
        if not is_stand_in(value):
            group.all_gather(flat, edges).wait()
        pieces = [
            flat[a:b].view(*value.shape[:-1], end - first)
            for (a, b), (first, end) in zip(pairwise(edges), ranges, strict=True)
        ]
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, end = ctx.range
        return grad[..., first:end], None, None


def apart(value: Tensor, group: Collectives) -> Tensor:
    """`value`, alike on all ranks, about to be used by each in its own way."""
    return _Apart.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def together(value: Tensor, group: Collectives) -> Tensor:
    """The sum of the ranks' `value`s, on all."""
    return _Together.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(value: Tensor, group: Collectives, ranges: Sequence[Range]) -> Tensor:
    """The whole of what is split along the last dimension; `ranges` are the ranks' parts."""
    return _Gathered.apply(value, group, ranges)  # type: ignore[no-any-return, no-untyped-call]
