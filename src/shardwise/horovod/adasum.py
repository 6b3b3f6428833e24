"""Adasum: gradients that point the same way are averaged, those at right angles added.

    a + b  becomes  (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

for two ranks, and so on for pairs of pairs (Maleki et al. 2020, "Scaling Distributed Training with
Adaptive Summation"). Dot products are of whole tensors, in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise import sum_tree
from shardwise.collectives import Collectives


def reduce(tensor: Tensor, group: Collectives, scale: float = 1.0) -> Tensor:
    """The adaptive sum of every rank's floating `tensor`, of its shape, times `scale`; alike on all
    ranks. `group` has a power of two of ranks. Twice the tensors have twice the sum."""
    rows = tensor.new_empty((group.size, tensor.numel()))
    rows[group.rank] = tensor.reshape(-1)
    cuts = [rank * tensor.numel() for rank in range(group.size + 1)]
    group.all_gather(rows.view(-1), cuts).reusable()
    total: Tensor = sum_tree.fold(list(rows.double()), pair)
    return total.mul(scale).to(tensor.dtype).view(tensor.shape)


def pair(a: Tensor, b: Tensor) -> Tensor:
    """The adaptive sum of two flat tensors."""
    dot = torch.dot(a, b)
    return _share(dot, a) * a + _share(dot, b) * b


def _share(dot: Tensor, of: Tensor) -> Tensor:
    """How much of `of` stays; all of it where it is zero, and adds nothing."""
    square = torch.dot(of, of)
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))
