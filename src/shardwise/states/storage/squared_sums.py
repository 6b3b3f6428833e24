"""Computes sums of squares for the gradient norm, in a few kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.precision import NARROW

CHUNK = 1 << 18
"""Elements whose squares are added up in the tensor's own precision."""


def squared_sum(values: Tensor) -> Tensor:
    """The sum of squares of a flat tensor in fp64, added by chunks: short fp32 sums do not drift.

    On an accelerator it takes a few kernels, whatever the length, and no copy to the host.
    """
    values = as_real(values)
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.numel() <= CHUNK:
        return torch.dot(values, values).double()
    if values.device.type != "cpu":
        return _squared_sum_on_device(values)
    chunks = torch.split(values, CHUNK)
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).double().sum()


def _squared_sum_on_device(values: Tensor) -> Tensor:
    """The same by one reduction over all chunks, since each launch of a kernel costs time."""
    whole = values.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(values[:whole].view(-1, CHUNK), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return torch.cat([norms, rest.view(1)]).double().square().sum()


def as_real(values: Tensor) -> Tensor:
    """`values` as real numbers of 32 bits or more."""
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    return values.float() if values.dtype in NARROW else values
