"""Grouped products of experts equal the loop over them. On CUDA, they are used in bf16."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel.expert import grouped_product
from shardwise.parallel.expert.grouped_product import are_groupable
from tests.unit.experts.naive import expert


class Gated(nn.Module):
    """A gated expert, as scripts write them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def layer_of(kind, dtype) -> sw.MoE:
    """Return a layer of 4 experts, one of which gets no tokens."""
    torch.manual_seed(0)
    router = nn.Linear(8, 4)
    with torch.no_grad():
        router.bias[2] = -1e4
    return sw.MoE(router, nn.ModuleList([kind(8, 16) for _ in range(4)]), top_k=2).to(dtype)


def results(layer: sw.MoE) -> list[Tensor]:
    """Return the output, and the gradients of the input and of all parameters."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8).to(next(layer.parameters()).dtype).requires_grad_()
    layer(x).square().sum().backward()
    with torch.no_grad():
        out = layer(x)
    found = [out, x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [expert, Gated])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_equals_the_loop(monkeypatch, kind, dtype, tolerance):
    layer = layer_of(kind, dtype)
    looped = results(layer)
    calls = []
    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: (calls.append(0), product(*a, **k))[1])
    monkeypatch.setattr(grouped_product, "allows", lambda rows, experts: True)
    grouped = results(layer)
    linears = sum(isinstance(m, nn.Linear) for m in layer.experts[0].modules())
    # Two forward passes, and a backward pass with two products per layer.
    assert len(calls) == 4 * linears
    for ours, theirs in zip(grouped, looped, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_loops_on_a_cpu_and_around_hooks(monkeypatch):
    layer = layer_of(expert, torch.bfloat16)
    monkeypatch.setattr(F, "grouped_mm", None)
    results(layer)
    monkeypatch.setattr(grouped_product, "allows", lambda rows, experts: True)
    seen = []
    layer.experts[1].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    results(layer)
    assert seen


class Centred(nn.Linear):
    """Computes something else for several rows together."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, out)."""
        return super().forward(x - x.mean(0))


class Scaled(nn.Linear):
    """Has an attribute that differs between experts."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, out)."""
        return super().forward(x) * self.factor


def scaled(factor: float) -> nn.Module:
    """Return an expert with a factor."""
    layer = Scaled(8, 8)
    layer.factor = factor
    return layer


GROUPABLE = {
    "sequence": (lambda: [expert(8, 4), expert(8, 4)], True),
    "gated": (lambda: [Gated(8, 4), Gated(8, 4)], True),
    "dropout": (lambda: [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in "ab"], True),
    "shapes": (lambda: [expert(8, 4), expert(8, 5)], False),
    "norm": (lambda: [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in "ab"], False),
    "rows": (lambda: [Centred(8, 8) for _ in "ab"], False),
    "factor": (lambda: [scaled(1.0), scaled(2.0)], False),
    "equal factors": (lambda: [scaled(2.0), scaled(2.0)], True),
}


@pytest.mark.parametrize("name", GROUPABLE)
def test_groups_only_experts_that_differ_in_weights(name):
    build, expected = GROUPABLE[name]
    state = torch.get_rng_state()
    experts = build()
    torch.set_rng_state(state)
    assert are_groupable(experts) is expected
    assert torch.equal(torch.get_rng_state(), state)
