"""Creates fake tensors, which have a shape and a dtype but no values and no storage."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks


@cache
def fake_mode() -> FakeTensorMode:
    """Return the FakeTensorMode that all fake tensors share.

    It is created on first use, because creating it at startup would cost every rank a few seconds.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(value: Tensor) -> FakeTensor:
    """Return a fake tensor with the metadata of `value`, detached from its graph."""
    if isinstance(value, FakeTensor):
        fake: Tensor = value.detach()
    else:
        with fake_mode():
            fake = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    assert isinstance(fake, FakeTensor)
    # Integer tensors cannot require gradients.
    if value.dtype.is_floating_point or value.dtype.is_complex:
        fake.requires_grad_(value.requires_grad)
    return fake


def fake_activation(value: Tensor) -> FakeTensor:
    """Return a fake tensor like `value` that supports in-place writes, as a layer's output does.

    If gradients are enabled, it is not a leaf, because autograd forbids in-place writes to leaves.
    """
    fake = fake_like(value)
    if not (fake.requires_grad and torch.is_grad_enabled()):
        return fake
    with without_saving():
        clone = fake.clone()
    assert isinstance(clone, FakeTensor)
    return clone


def without_saving() -> saved_tensors_hooks:
    """Context manager that disables saved-tensor hooks.

    Fake tensors have no memory to offload.
    """
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
