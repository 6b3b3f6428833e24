"""Collectives at the borders of tensor-parallel regions, each with its backward.

Inside a region each rank has a part of an activation; outside all have the same. What is a copy in
one direction is a sum in the other (f and g of Megatron-LM, Shoeybi et al., 2019; the last two are
those of its sequence parallelism, Korthikanti et al., 2022):

                                forward              backward
    copy_to_region              identity             all-reduce
    reduce_from_region          all-reduce           identity
    gather_from_region          all-gather           this rank's part
    scatter_to_region           this rank's part     all-gather
    gather_from_sequence        all-gather           reduce-scatter
    reduce_scatter_to_sequence  reduce-scatter       all-gather
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Collectives
from shardwise.layout.shards import Range


@dataclass(frozen=True)
class ShardedDim:
    """A dimension, counted from the last, of which each rank has a range."""

    dim: int
    ranges: Sequence[Range]

    @property
    def size(self) -> int:
        """The length of the whole dimension."""
        return self.ranges[-1][1]

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """The part of `rank`, a view."""
        first, end = self.ranges[rank]
        return whole.narrow(self.dim, first, end - first)

    def shapes(self, like: Sequence[int]) -> list[list[int]]:
        """The shape of each rank's part of a tensor shaped as `like` in all other dimensions."""
        return [self._shape(like, end - first) for first, end in self.ranges]

    def whole_shape(self, like: Sequence[int]) -> list[int]:
        """The shape of the whole tensor."""
        return self._shape(like, self.size)

    def _shape(self, like: Sequence[int], length: int) -> list[int]:
        shape = list(like)
        shape[self.dim] = length
        return shape


def is_fake(value: Tensor) -> bool:
    """Whether `value` has a shape and no numbers (a FakeTensor), so that nothing is
    communicated."""
    return isinstance(value, FakeTensor)


def all_reduced(value: Tensor, group: Collectives) -> Tensor:
    """The sum of `value` (any shape) over `group`, in new memory; the same bits on all ranks."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if is_fake(value):
        return total
    group.all_reduce(total.view(-1)).wait()
    return total


def all_gathered(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """The whole tensor of which each rank has its `part`, on all ranks."""
    shapes = sharded.shapes(part.shape)
    whole = part.new_empty(sharded.whole_shape(part.shape))
    in_order = part.shape[: sharded.dim].numel() == 1  # one after the other they are the whole
    flat = whole.view(-1) if in_order else torch.empty_like(whole).view(-1)
    shards = all_gather_tensors(part, group, shapes, flat)
    return whole if in_order else torch.cat(shards, sharded.dim, out=whole)


def all_gather_tensors(
    shard: Tensor, group: Collectives, shapes: Sequence[Sequence[int]], flat: Tensor | None = None
) -> list[Tensor]:
    """Every rank's `shard`, of these `shapes` by rank, on all ranks: views of `flat` or of new
    memory."""
    edges = _edges(shapes)
    flat = shard.new_empty(edges[-1]) if flat is None else flat
    flat[edges[group.rank] : edges[group.rank + 1]] = shard.detach().reshape(-1)
    if not is_fake(shard):
        group.all_gather(flat, edges).wait()
    return [flat[a:b].view(s) for (a, b), s in zip(pairwise(edges), shapes, strict=True)]


def reduce_scattered(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """This rank's part of the sum of all ranks' `value`."""
    shards = [sharded.shard(value.detach(), rank) for rank in range(group.size)]
    own = torch.empty_like(shards[group.rank], memory_format=torch.contiguous_format)
    if is_fake(value):
        return own
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    edges = _edges([shard.shape for shard in shards])
    group.reduce_scatter(flat, edges, into=own.view(-1)).wait()
    return own


def _edges(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The offsets of tensors of these shapes in one flat buffer."""
    edges = [0]
    for shape in shapes:
        edges.append(edges[-1] + torch.Size(shape).numel())
    return edges


# The backward of each is another one, so that it can be gone through again.


class _CopyToRegion(torch.autograd.Function):
    """Copies several values at once, so that one all-reduce sums their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if len(grads) == 1:
            return None, reduce_from_region(grads[0], ctx.group)
        flat = reduce_from_region(torch.cat([grad.reshape(-1) for grad in grads]), ctx.group)
        sums = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(
            part.view(grad.shape).to(grad.dtype) for part, grad in zip(sums, grads, strict=True)
        )


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return all_reduced(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (copy_to_region(ctx.group, grad)[0] if torch.is_grad_enabled() else grad), None


class _AllGather(torch.autograd.Function):
    """All-gathers parts. With `sums` each rank uses the whole in its own way, so gradients are
    summed."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: Collectives, sharded: ShardedDim, sums: bool
    ) -> Tensor:
        ctx.args = group, sharded, sums
        return all_gathered(part, group, sharded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _TakeShard.apply(grad, *ctx.args), None, None, None  # type: ignore[no-untyped-call]


class _TakeShard(torch.autograd.Function):
    """Takes this rank's part: of the sum over ranks with `sums`, else of a value that all have."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: Collectives, sharded: ShardedDim, sums: bool
    ) -> Tensor:
        ctx.args = group, sharded, sums
        if sums:
            return reduce_scattered(value, group, sharded)
        return sharded.shard(value, group.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllGather.apply(grad, *ctx.args), None, None, None  # type: ignore[no-untyped-call]


def copy_to_region(group: Collectives, *values: Tensor) -> tuple[Tensor, ...]:
    """`values`, equal on all ranks, for use by each rank in its own way."""
    return _CopyToRegion.apply(group, *values)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(value: Tensor, group: Collectives) -> Tensor:
    """The sum of the ranks' `value`, on all ranks."""
    return _ReduceFromRegion.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_region(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """The whole of a split tensor, for use by all ranks alike."""
    return _AllGather.apply(part, group, sharded, False)  # type: ignore[no-any-return, no-untyped-call]


def scatter_to_region(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """This rank's part of `value`, which is equal on all ranks."""
    return _TakeShard.apply(value, group, sharded, False)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_sequence(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """The whole of a split tensor, for use by each rank in its own way."""
    return _AllGather.apply(part, group, sharded, True)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_to_sequence(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """This rank's part of the sum of the ranks' `value`."""
    return _TakeShard.apply(value, group, sharded, True)  # type: ignore[no-any-return, no-untyped-call]
