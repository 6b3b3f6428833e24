"""Makes fake tensors: those of a shape and dtype, without values or memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks


@cache
def fake_mode() -> FakeTensorMode:
    """The mode in which fake tensors are made: torch computes their shapes and dtypes, without
    memory.

    Made on first use: that takes seconds, which every rank would wait at its start.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(value: Tensor) -> FakeTensor:
    """A fake tensor like `value`, without a graph."""
    if isinstance(value, FakeTensor):
        made: Tensor = value.detach()
    else:
        with fake_mode():
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    assert isinstance(made, FakeTensor)
    if value.dtype.is_floating_point or value.dtype.is_complex:  # integers cannot require gradients
        made.requires_grad_(value.requires_grad)
    return made


def fake_activation(value: Tensor) -> FakeTensor:
    """A fake tensor like `value` that may be written in place, as what a layer returns may be: with
    gradients on, it is no leaf."""
    made = fake_like(value)
    if not (made.requires_grad and torch.is_grad_enabled()):
        return made
    with without_saving():
        copied = made.clone()
    assert isinstance(copied, FakeTensor)
    return copied


def without_saving() -> saved_tensors_hooks:
    """Save tensors for backward as they are inside the block: nothing of fake tensors is worth
    moving."""
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
