"""Recomputed or offloaded, activations give the same gradients as kept ones, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.model.activation_offload import SavedTensors
from shardwise.model.activations import OffloadScope
from shardwise.model.offloaded_tensor import HostTarget, StagedDiskTarget
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import DeviceSpool
from shardwise.tiers.spool import Spool
from tests.unit.activations.models import CPU, WAYS, make, on, same, x

Use = Callable[[nn.Module], object]


def once(model: nn.Module) -> None:
    model(x()).backward()


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(x(step)).backward()
        optimizer.step()


def blocks_used_twice(model: nn.Module) -> None:
    model(x(), times=2).backward()


def two_forwards_then_backward(model: nn.Module) -> None:
    (model(x(1)) + model(x(2))).backward()


def two_forwards_the_first_goes_back_first(model: nn.Module) -> None:
    losses = [model(x(1)), model(x(2))]
    for loss in losses:
        loss.backward()


def backward_twice(model: nn.Module) -> None:
    loss = model(x())
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def evaluation_between(model: nn.Module) -> None:
    loss = model(x())
    with torch.no_grad():
        model(x(1))
    model.eval()
    with torch.inference_mode():
        model(x(2))
    model.train()
    loss.backward()


def in_eval_mode_then_training(model: nn.Module) -> None:
    model.eval()
    model(x()).backward()
    model.train()
    model(x(1)).backward()
    model(x(2)).backward()


def under_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x(), times=2)
    loss.backward()


def an_exception_then_on(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(x(rows=1))
    model(x()).backward()


def inputs_with_gradients(model: nn.Module) -> None:
    rows = x().requires_grad_()
    model(rows).backward()
    assert rows.grad is not None
    model.register_buffer("of_rows", rows.grad, persistent=False)


def part_frozen(model: nn.Module) -> None:
    model.get_parameter("blocks.0.first.weight").requires_grad_(False)
    model.get_parameter("scale").requires_grad_(False)
    once(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)


USES: list[Use] = [
    once,
    steps,
    blocks_used_twice,
    two_forwards_then_backward,
    two_forwards_the_first_goes_back_first,
    backward_twice,
    evaluation_between,
    in_eval_mode_then_training,
    under_autocast,
    an_exception_then_on,
    inputs_with_gradients,
    part_frozen,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_same_bits_as_kept(use: Use, way: str, folder: Path) -> None:
    plain, ours = make(), make()
    torch.manual_seed(5)
    use(plain)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    with on(ours, way, folder):
        use(ours)
    assert torch.equal(torch.rand(3), drawn), "the generator went on from elsewhere"
    same(ours, plain)


def ways_out(folder: Path) -> dict[str, Any]:
    """The targets for accelerator tensors, tested with the CPU as the accelerator."""
    spool = DeviceSpool(Spool(folder, "activations", rank=0), CopyStream(CPU))
    return {"host": HostTarget(CPU), "disk behind host": StagedDiskTarget(spool)}


@pytest.mark.parametrize("way", ["host", "disk behind host"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_ways_out_of_an_accelerator(use: Use, way: str, folder: Path) -> None:
    plain, ours = make(), make()
    torch.manual_seed(5)
    use(plain)
    torch.manual_seed(5)
    OffloadScope([ours], SavedTensors(ways_out(folder)[way], "cpu")).attach(ours)
    use(ours)
    same(ours, plain)
