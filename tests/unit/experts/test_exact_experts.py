"""Experts that run on one micro-shard at a time: the bits of separate runs, added in the tree."""

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.layout import sum_tree
from shardwise.parallel.expert.exact_experts import fresh, own_stream, run_each
from shardwise.parallel.expert.split_experts import find_fused, unsplit_reasons
from tests.distributed.test_experts_of_transformers import build
from tests.unit.experts.naive import expert

ROWS = (5, 4, 0, 7, 3, 6, 2, 8)


def run(layer: nn.Module, parts: list[torch.Tensor], summed: set[int]) -> torch.Tensor:
    return run_each([layer], parts, lambda _, part: fresh(layer(fresh(part))), summed)


def test_gradients_have_the_bits_of_the_tree():
    torch.manual_seed(0)
    layer = expert(6, 5)
    x = torch.randn(sum(ROWS), 6)
    slope = torch.randn(sum(ROWS), 6)
    outputs = run(layer, list(x.split(ROWS)), set())
    outputs.backward(slope)
    together = [p.grad for p in layer.parameters()]
    apart, values = [], []
    for part, grad in zip(x.split(ROWS), slope.split(ROWS), strict=True):
        layer.zero_grad()
        values.append(layer(part.clone()))
        values[-1].backward(grad.clone())
        apart.append([p.grad for p in layer.parameters()])
    assert torch.equal(outputs, torch.cat(values))
    for ours, *each in zip(together, *apart, strict=True):
        assert torch.equal(ours, sum_tree.fold(each, torch.add))
    # In the order of autograd, the sum of the first weight has other bits.
    in_order = sum(grads[0] for grads in reversed(apart))
    assert not torch.equal(in_order, together[0])


def test_refuses_two_runs_before_a_backward_pass():
    layer, summed = expert(6, 5), set()
    parts = [torch.randn(2, 6), torch.randn(2, 6)]
    both = run(layer, parts, summed).sum() + run(layer, parts, summed).sum()
    with pytest.raises(UsageError, match="ran twice before this backward pass"):
        both.backward()


def test_own_stream_restores_the_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    device = torch.device("cpu")
    with own_stream(device, 7, 1):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with own_stream(device, 7, 1):
        assert torch.equal(torch.rand(2), first)
    with own_stream(device, 7, 2):
        assert not torch.equal(torch.rand(2), first)


def test_does_not_split_experts_with_a_replaced_forward():
    fused = find_fused([build("mixtral")])
    own, replaced = fused.values()
    # Exact mode runs the forward of the class, so it would silently ignore this one.
    replaced.forward = own.forward
    assert list(unsplit_reasons(fused).values()) == [None, "its forward has been replaced"]
