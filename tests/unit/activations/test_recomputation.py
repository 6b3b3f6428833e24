"""Recomputed units: their reads, their number of runs, and the memory that they keep."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from tests.unit.activations.models import gradients, make, on, same, x


class Codebook(nn.Module):
    """A forward that reads a buffer and then, from the third call on, changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x * self.shift).tanh()
        if torch.is_grad_enabled():
            self.shift = self.shift * 2 if self.calls % 2 else self.shift.mul_(3)
        return out.square().sum()


def test_a_recomputation_reads_the_buffers_that_the_forward_read(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Codebook()
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        with on(ours, "recomputed", folder) if model is ours else contextlib.nullcontext():
            losses = []
            for calls in range(3):
                model.calls = calls
                losses.append(model(x(calls)))
            sum(losses).backward()
    same(ours, plain)


def test_hooks_of_a_unit_fire_once_and_in_no_grad_nothing_runs_twice(folder: Path) -> None:
    model, fired, ran = make(), [], []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda *_: fired.append("before"))
    block.register_forward_hook(lambda *_: fired.append("after"))
    block.first.register_forward_hook(lambda *_: ran.append(1))
    with on(model, "recomputed", folder):
        model(x()).backward()
        assert fired == ["before", "after"]
        assert len(ran) == 2
        with torch.no_grad():
            model(x())
        assert len(ran) == 3


def test_nothing_inside_the_units_is_kept(folder: Path) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    sizes = {}
    for way in ("kept", "recomputed"):
        model = make()
        kept.clear()
        with (
            on(model, way, folder),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            model(x())
        wide = [tensor for tensor in kept if tensor.shape == (12, 16)]
        sizes[way] = len(wide)
    assert sizes["kept"] > 5
    assert sizes["recomputed"] == 0


def test_a_forward_that_user_code_assigned_to_a_unit_is_run(folder: Path) -> None:
    model = make()
    block = model.blocks[0]
    original = block.forward

    def doubled(state: Any, **options: Any) -> Any:
        return original({**state, "x": state["x"] * 2}, **options)

    block.forward = doubled  # type: ignore[method-assign]
    torch.manual_seed(3)
    model(x()).backward()
    wanted = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    torch.manual_seed(3)
    with on(model, "recomputed", folder):
        model(x()).backward()
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(model).items())
    assert block.forward is doubled


class Counting(nn.Module):
    """Reads and changes attributes: a number, one created later, a list, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.scales = [1.0]
        self.seen: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scales.append(self.scales[-1] * 1.5)
        self.seen["x"] = self.seen.get("x", 0) + 1
        out = self.linear(x * self.calls).tanh() * self.scales[-1] * self.seen["x"]
        if hasattr(self, "last"):
            out = out + self.last
        self.last = out.detach()
        return out.square().sum()


def test_a_recomputation_reads_the_attributes_that_the_forward_read(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Counting()
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        with on(ours, "recomputed", folder) if model is ours else contextlib.nullcontext():
            for _ in range(2):
                sum(model(x(calls)) for calls in range(2)).backward()
    same(ours, plain)
    assert (ours.calls, ours.scales, ours.seen) == (plain.calls, plain.scales, plain.seen)
    assert torch.equal(ours.last, plain.last)


class Averaging(nn.Module):
    """Changes a tensor in place that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x - self.mean).square().sum()


def test_a_tensor_changed_in_place_must_be_a_buffer(folder: Path) -> None:
    model = Averaging()
    with (
        on(model, "recomputed", folder),
        pytest.raises(ModelError, match=r"changes its tensor attribute mean.*register_buffer"),
    ):
        model(x())


class Crossing(nn.Module):
    """Branches on whether two arguments are the same object, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keyed = self.linear(key)
        valued = keyed if key is value else self.other(value)
        return (self.linear(query) * keyed.tanh() * valued.sin() + self.other(query)).sum()


def test_identical_arguments_are_identical_in_the_recomputation(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Crossing()
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        with on(ours, "recomputed", folder) if model is ours else contextlib.nullcontext():
            key = x(1).requires_grad_() * 2
            model(x(2), key, key).backward()
    same(ours, plain)
