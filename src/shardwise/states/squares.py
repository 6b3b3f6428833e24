"""Sums of squares: of a whole tensor, or piece by piece while its sum is being made."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.precision import NARROW

CHUNK = 1 << 18
"""Elements of which the squares are added up in the tensor's own precision."""


def squares(values: Tensor) -> Tensor:
    """The sum of squares in fp64, by chunks: short fp32 sums, so that none drifts."""
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    if values.dtype in NARROW:
        values = values.float()
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.numel() <= CHUNK:
        return torch.dot(values, values).double()
    if values.device.type != "cpu":
        return _of_chunks_together(values)
    chunks = torch.split(values, CHUNK)
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).double().sum()


def _of_chunks_together(values: Tensor) -> Tensor:
    """The same by as few kernels as an accelerator needs, whatever the length."""
    whole = values.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(values[:whole].view(-1, CHUNK), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return torch.cat([norms, rest.view(1)]).double().square().sum()


class Squares:
    """The sum of squares of a sum over the ranks, told in pieces as it is made.

    It is `complete` when just one sum was announced since `clear`, and the transport told it.
    """

    def __init__(self) -> None:
        self.clear()

    def announce(self) -> None:
        """Another sum comes, to be added to what is there."""
        self._sums += 1

    def add(self, piece: Tensor) -> None:
        """Take the next piece of the sum that was announced."""
        self._pieces.append(squares(piece))

    @property
    def complete(self) -> bool:
        return self._sums == 1 and bool(self._pieces)

    def total(self) -> Tensor:
        """An fp64 scalar."""
        return torch.stack(self._pieces).sum()

    def clear(self) -> None:
        """Forget what was announced and told."""
        self._sums = 0
        self._pieces: list[Tensor] = []
