"""Where the ranks of a replica go apart and come together, in forward and in backward.

Between the two each rank has a part of an activation; outside all have the same. What is a copy in
one direction is a sum in the other (f and g of Megatron-LM, Shoeybi et al., 2019; the last two are
those of its sequence parallelism, Korthikanti et al., 2022):

                 forward                      backward
    apart        as it is                     summed over the ranks
    together     summed                       as it is
    gathered     parts joined                 this rank's part
    taken        this rank's part             parts joined
    spread       parts joined                 summed, of it this rank's part
    scattered    summed, of it this rank's    parts joined
                 part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.collectives import Collectives
from shardwise.shards import Range


@dataclass(frozen=True)
class Parts:
    """A dimension, counted from the last, of which each rank has a range."""

    dim: int
    ranges: Sequence[Range]

    @property
    def size(self) -> int:
        """The length of the whole."""
        return self.ranges[-1][1]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The part of `rank`, a view."""
        first, end = self.ranges[rank]
        return whole.narrow(self.dim, first, end - first)

    def shapes(self, like: Sequence[int]) -> list[list[int]]:
        """By rank the shape of its part of what is shaped as `like` in all other dimensions."""
        return [self._shape(like, end - first) for first, end in self.ranges]

    def whole_shape(self, like: Sequence[int]) -> list[int]:
        """The shape of that whole."""
        return self._shape(like, self.size)

    def _shape(self, like: Sequence[int], length: int) -> list[int]:
        shape = list(like)
        shape[self.dim] = length
        return shape


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


def joined(part: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """The whole of which each rank has its `part`, on all."""
    shapes = parts.shapes(part.shape)
    whole = part.new_empty(parts.whole_shape(part.shape))
    in_order = part.shape[: parts.dim].numel() == 1  # one after the other they are the whole
    flat = whole.view(-1) if in_order else torch.empty_like(whole).view(-1)
    pieces = told_by_all(part, group, shapes, flat)
    return whole if in_order else torch.cat(pieces, parts.dim, out=whole)


def told_by_all(
    piece: Tensor, group: Collectives, shapes: Sequence[Sequence[int]], flat: Tensor | None = None
) -> list[Tensor]:
    """Every rank's `piece`, by rank of these `shapes`, on all: views of `flat` or new memory."""
    edges = _edges(shapes)
    flat = piece.new_empty(edges[-1]) if flat is None else flat
    flat[edges[group.rank] : edges[group.rank + 1]] = piece.detach().reshape(-1)
    if not is_stand_in(piece):
        group.all_gather(flat, edges).wait()
    return [flat[a:b].view(s) for (a, b), s in zip(pairwise(edges), shapes, strict=True)]


def part_of_sum(value: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """This rank's part of the sum of all ranks' `value`s."""
    pieces = [parts.of(value.detach(), rank) for rank in range(group.size)]
    own = torch.empty_like(pieces[group.rank], memory_format=torch.contiguous_format)
    if is_stand_in(value):
        return own
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    edges = _edges([piece.shape for piece in pieces])
    group.reduce_scatter(flat, edges, into=own.view(-1)).wait()
    return own


def _edges(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Where tensors of these shapes begin and end, one after the other."""
    edges = [0]
    for shape in shapes:
        edges.append(edges[-1] + torch.Size(shape).numel())
    return edges


# The backward of each is another one, so that it can be gone through again.


class _Apart(torch.autograd.Function):
    """Of several values at once, whose gradients are summed together."""

    @staticmethod
    def forward(ctx: Any, group: Collectives, *several: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(value.view_as(value) for value in several)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if len(grads) == 1:
            return None, together(grads[0], ctx.group)
        flat = together(torch.cat([grad.reshape(-1) for grad in grads]), ctx.group)
        sums = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(
            part.view(grad.shape).to(grad.dtype) for part, grad in zip(sums, grads, strict=True)
        )


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (apart(ctx.group, grad)[0] if torch.is_grad_enabled() else grad), None


class _Joined(torch.autograd.Function):
    """Where it `sums`, each rank uses the whole in its own way, and has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Collectives, parts: Parts, sums: bool) -> Tensor:
        ctx.how = group, parts, sums
        return joined(part, group, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Parted.apply(grad, *ctx.how), None, None, None  # type: ignore[no-untyped-call]


class _Parted(torch.autograd.Function):
    """Where it `sums`, of what each rank has a part of in its `value`; else of what all have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Collectives, parts: Parts, sums: bool) -> Tensor:
        ctx.how = group, parts, sums
        if sums:
            return part_of_sum(value, group, parts)
        return parts.of(value, group.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Joined.apply(grad, *ctx.how), None, None, None  # type: ignore[no-untyped-call]


def apart(group: Collectives, *several: Tensor) -> tuple[Tensor, ...]:
    """`several`, alike on all ranks, about to be used by each in its own way."""
    return _Apart.apply(group, *several)  # type: ignore[no-any-return, no-untyped-call]


def together(value: Tensor, group: Collectives) -> Tensor:
    """The sum of the ranks' `value`s, on all."""
    return _Together.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(part: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """The whole of what is split, for all to use alike."""
    return _Joined.apply(part, group, parts, False)  # type: ignore[no-any-return, no-untyped-call]


def taken(value: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """This rank's part of `value`, which is alike on all ranks."""
    return _Parted.apply(value, group, parts, False)  # type: ignore[no-any-return, no-untyped-call]


def spread(part: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """The whole of what is split, about to be used by each rank in its own way."""
    return _Joined.apply(part, group, parts, True)  # type: ignore[no-any-return, no-untyped-call]


def scattered(value: Tensor, group: Collectives, parts: Parts) -> Tensor:
    """This rank's part of the sum of the ranks' `value`s."""
    return _Parted.apply(value, group, parts, True)  # type: ignore[no-any-return, no-untyped-call]
