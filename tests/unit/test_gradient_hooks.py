"""Hooks on parameters must be linear, for gradients of any size."""

import pytest
import torch
from torch import nn

from shardwise.engine import gradient_hooks
from shardwise.errors import UsageError
from shardwise.states.parameters.named_parameters import NamedParameter

LINEAR = {
    "mask": lambda grad: grad * torch.arange(4).remainder(2),
    "factor": lambda grad: grad * 0.3,
    "large factor": lambda grad: grad * 3,
}
OTHERS = {
    "clamp": lambda grad: grad.clamp(-0.01, 0.01),
    "abs": lambda grad: grad.abs(),
    "normalise": lambda grad: grad / grad.norm(),
}


def trial(hook, dtype):
    """Return the replacement of `hook` on a parameter."""
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    parameter.register_hook(hook)
    gradient_hooks.watch([NamedParameter("weight", parameter)])
    (stand_in,) = parameter._backward_hooks.values()
    return stand_in, parameter


def gradient(scale, dtype):
    return (torch.tensor([1.0, 0.3, -0.7, 0.0], dtype=torch.float64) * scale).to(dtype)


SIZES = [
    *((torch.float16, scale) for scale in (1e-6, 1e-2, 100.0, 20000.0)),
    *((torch.bfloat16, scale) for scale in (1e-30, 1e3, 1e35)),
    *((torch.float32, scale) for scale in (1e-12, 1e3, 1e36)),
]


@pytest.mark.parametrize(("dtype", "scale"), SIZES)
@pytest.mark.parametrize("hook", LINEAR)
def test_accepts_linear_hooks_at_any_gradient_size(hook, dtype, scale):
    stand_in, parameter = trial(LINEAR[hook], dtype)
    grad = gradient(scale, dtype)
    assert torch.equal(stand_in(grad), LINEAR[hook](grad))
    assert list(parameter._backward_hooks.values()) == [LINEAR[hook]]


@pytest.mark.parametrize(("dtype", "scale"), [(d, s) for d, s in SIZES if 1e-6 <= s <= 1e5])
@pytest.mark.parametrize("hook", OTHERS)
def test_refuses_other_hooks_at_any_gradient_size(hook, dtype, scale):
    stand_in, _ = trial(OTHERS[hook], dtype)
    with pytest.raises(UsageError, match=r"weight .* is not linear"):
        stand_in(gradient(scale, dtype))
