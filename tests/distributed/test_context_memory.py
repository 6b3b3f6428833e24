"""With `--context`, a worker holds its part of the activations."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import shardwise as sw
from tests.distributed.contexts import Problem

PROBLEM = Problem(rows=(4,), length=16)


def counted(model: nn.Module, found: dict[int, int]) -> AbstractContextManager[None]:
    """Collect the storages that autograd saves for the backward pass, except parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    return saved_tensors_hooks(save, lambda tensor: tensor)


def saved_bytes(world: sw.World) -> int:
    """Return the saved bytes of the second step. In the first, the model is tested."""
    model, found = PROBLEM.model(), dict[int, int]()
    engine = sw.Engine(model, PROBLEM.optimizer_of(model), quiet=True)
    for number in range(2):
        batch = world.share(PROBLEM.batches(number)[0])
        found.clear()
        with counted(model, found):
            loss = PROBLEM.loss_of(model, batch)
        # The hooks hide the labels from the engine.
        engine.backward(loss, weight=int((batch[-1] != -100).sum()))
        engine.step()
    return sum(found.values())


@pytest.mark.parametrize("size", [2, 4])
def test_activations_are_divided_by_the_number_of_parts(group, size):
    model, whole = PROBLEM.model(), dict[int, int]()
    with counted(model, whole):
        loss = PROBLEM.loss_of(model, PROBLEM.batches(1)[0])
    assert loss.requires_grad
    parts = group(size, context=size, context_method="ulysses")(saved_bytes)
    assert max(parts) * size == pytest.approx(sum(whole.values()), rel=0.1)


class Deep(nn.Module):
    """Attention, and then many layers, whose weights need more memory than anything else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(8, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])

    def forward(self, ids: Tensor) -> Tensor:
        """Return (rows, tokens, width)."""
        heads = self.words(ids).unflatten(-1, (4, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = attended.transpose(1, 2).flatten(2)
        for layer in self.layers:
            x = x + layer(x)
        return x


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def growth_in_trial(world: sw.World) -> tuple[int, int]:
    """Return by how many bytes a trial raises the peak, and the model's bytes in fp64."""
    growth = 0
    # The first trial loads libraries. glibc returns each matrix of 2112 x 2112 x 8 bytes to the
    # system when it is freed, because it is larger than 32 MiB.
    for width in (8, 2112):
        model = Deep(width)
        engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        (ids,) = world.share((torch.arange(14).view(2, 7) % 8,))
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak()
        with torch.no_grad():
            model(ids)
        growth = peak() - before
        engine.close()
    return growth, 8 * sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_trial_needs_no_copy_of_the_model(group):
    for growth, whole in group(2, context=2)(growth_in_trial, limit=180):
        # One of the six weights, its gradient and another copy, but not all of them.
        assert growth < 0.7 * whole
