"""Numbers that tell whether the bits of tensors are others, without a copy of what they were."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements that are weighed at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their bytes."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as a signed number."""


def integers(tensor: Tensor) -> Tensor:
    """The same memory as integers; of complex numbers two each, in a last dimension."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.element_size()])


def total(tensor: Tensor) -> Tensor:
    """The sum of the bits as integers, modulo 2^64: quick, and blind to where they are."""
    return integers(tensor).sum()


def fingerprint(tensor: Tensor) -> Tensor:
    """The same sum, each integer times a number that its place gives: another where elements are
    exchanged, or signs are turned."""
    flat = integers(tensor).reshape(-1)
    sums = [_weighed(part, CHUNK * number) for number, part in enumerate(torch.split(flat, CHUNK))]
    return torch.stack(sums).sum()


def _weighed(part: Tensor, start: int) -> Tensor:
    weights = torch.arange(start + 1, start + 1 + part.numel(), device=part.device).mul_(_ODD)
    weights.bitwise_xor_(weights >> 29).mul_(_ODD).bitwise_xor_(weights >> 32)
    return weights.mul_(part).sum()
