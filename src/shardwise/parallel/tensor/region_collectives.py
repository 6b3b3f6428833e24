"""Implements the collectives at the boundaries of tensor-parallel regions.

Inside a region, each rank has a part of an activation. Outside, all ranks have the same tensor. The
backward pass of a copy is a sum, and vice versa. The first four collectives are from Megatron-LM
(Shoeybi et al., 2019, who call the first two f and g). The last two are from its sequence
parallelism (Korthikanti et al., 2022).

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
from shardwise.layout.bucket_layout import Span


@dataclass(frozen=True)
class ShardedDim:
    """A tensor dimension that is split into one range per rank.

    `dim` is negative: it counts from the last dimension.
    """

    dim: int
    ranges: Sequence[Span]

    @property
    def size(self) -> int:
        """The full length of the dimension."""
        return self.ranges[-1][1]

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return rank `rank`'s part of `whole`, as a view."""
        first, end = self.ranges[rank]
        return whole.narrow(self.dim, first, end - first)

    def shapes(self, like: Sequence[int]) -> list[list[int]]:
        """Return the shape of each rank's part. The other dimensions are taken from `like`."""
        return [self._shape(like, end - first) for first, end in self.ranges]

    def whole_shape(self, like: Sequence[int]) -> list[int]:
        """Return the shape of the full tensor. The other dimensions are taken from `like`."""
        return self._shape(like, self.size)

    def _shape(self, like: Sequence[int], length: int) -> list[int]:
        shape = list(like)
        shape[self.dim] = length
        return shape


def is_fake(value: Tensor) -> bool:
    """Return whether `value` is a FakeTensor, which has no data to communicate."""
    return isinstance(value, FakeTensor)


def all_reduced(value: Tensor, group: Collectives) -> Tensor:
    """Return the sum of `value` (any shape) over `group`, bit-identical on all ranks.

    The result is a new tensor.
    """
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if is_fake(value):
        return total
    group.all_reduce(total.view(-1)).wait()
    return total


def all_gathered(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Return the full tensor on all ranks, gathered from each rank's `part`."""
    shapes = sharded.shapes(part.shape)
    whole = part.new_empty(sharded.whole_shape(part.shape))
    # If the leading dimension is split, the concatenated parts are the full tensor. Gather in
    # place, which avoids the copy in `cat`.
    in_order = part.shape[: sharded.dim].numel() == 1
    flat = whole.view(-1) if in_order else torch.empty_like(whole).view(-1)
    shards = all_gather_tensors(part, group, shapes, flat)
    return whole if in_order else torch.cat(shards, sharded.dim, out=whole)


def all_gather_tensors(
    shard: Tensor, group: Collectives, shapes: Sequence[Sequence[int]], flat: Tensor | None = None
) -> list[Tensor]:
    """All-gather `shard` from all ranks. Return the shards in rank order.

    `shapes` holds the shape of each rank's shard. The results are views of `flat`, or of new memory
    if `flat` is None.
    """
    edges = _edges(shapes)
    flat = shard.new_empty(edges[-1]) if flat is None else flat
    flat[edges[group.rank] : edges[group.rank + 1]] = shard.detach().reshape(-1)
    if not is_fake(shard):
        group.all_gather(flat, edges).wait()
    return [flat[a:b].view(s) for (a, b), s in zip(pairwise(edges), shapes, strict=True)]


def reduce_scattered(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Return this rank's part of the sum of `value` over all ranks."""
    shards = [sharded.shard(value.detach(), rank) for rank in range(group.size)]
    own = torch.empty_like(shards[group.rank], memory_format=torch.contiguous_format)
    if is_fake(value):
        return own
    # Copy the shards in rank order, because a shard of a middle dimension is not contiguous in the
    # full tensor.
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    edges = _edges([shard.shape for shard in shards])
    group.reduce_scatter(flat, edges, into=own.view(-1)).wait()
    return own


def _edges(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the offsets of tensors with these shapes in a flat buffer, followed by its size."""
    edges = [0]
    for shape in shapes:
        edges.append(edges[-1] + torch.Size(shape).numel())
    return edges


# Each `backward` calls another Function instead of computing directly, so that it can be
# differentiated again (create_graph=True).


class _CopyToRegion(torch.autograd.Function):
    """Copies several values at once, so that a single all-reduce sums all their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if len(grads) == 1:
            return None, reduce_from_region(grads[0], ctx.group)
        # Use one collective for all gradients, because its latency costs more than the copy.
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
        # All ranks have the same gradient of the sum, so no communication is needed. With
        # create_graph, each rank may use it differently, so the second backward pass must sum.
        return (copy_to_region(ctx.group, grad)[0] if torch.is_grad_enabled() else grad), None


class _AllGather(torch.autograd.Function):
    """All-gathers the ranks' parts.

    If `sums` is true, each rank uses the result differently, so the backward pass sums the
    gradients.
    """

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
    """Returns this rank's part of a value.

    If `sums` is true, the value is first summed over the ranks. Otherwise it is identical on all
    ranks.
    """

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
    """Return copies of `values` that each rank may use differently.

    `values` must be identical on all ranks.
    """
    return _CopyToRegion.apply(group, *values)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(value: Tensor, group: Collectives) -> Tensor:
    """Return the sum of `value` over all ranks, on all ranks."""
    return _ReduceFromRegion.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_region(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Gather a split tensor that all ranks then use in the same way."""
    return _AllGather.apply(part, group, sharded, False)  # type: ignore[no-any-return, no-untyped-call]


def scatter_to_region(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Return this rank's part of `value`. `value` must be identical on all ranks."""
    return _TakeShard.apply(value, group, sharded, False)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_sequence(part: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Gather a split tensor that each rank then uses differently."""
    return _AllGather.apply(part, group, sharded, True)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_to_sequence(value: Tensor, group: Collectives, sharded: ShardedDim) -> Tensor:
    """Return this rank's part of the sum of `value` over all ranks."""
    return _TakeShard.apply(value, group, sharded, True)  # type: ignore[no-any-return, no-untyped-call]
