"""Which buffers change in evaluations and recomputations, and their restoration."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.tools.verify.stock.stateful_forwards import (
    EVALUATION,
    MICRO_BATCH,
    RECOMPUTATION,
    StatefulForwards,
)


class Counting(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.weight * x * self.scale


def counted(restores: str | None) -> tuple[float, StatefulForwards]:
    """Return the count of a training pass, its recomputation and an evaluation."""
    model, inside = Counting(), []
    stateful = StatefulForwards(lambda: bool(inside), restores)
    stateful.know([("net", model)])
    loss = checkpoint(model, torch.ones(3), use_reentrant=False).exp().sum()
    inside.append(True)
    loss.backward()
    inside.clear()
    model.eval()
    with torch.no_grad():
        model(torch.ones(3))
    return float(model.count), stateful


@pytest.mark.parametrize(
    ("restores", "count"), [(None, 3.0), (EVALUATION, 2.0), (RECOMPUTATION, 2.0)]
)
def test_names_and_restores_changed_buffers(restores: str | None, count: float) -> None:
    found, stateful = counted(restores)
    assert found == count
    names = ["net.count"]
    assert stateful.plain() == {EVALUATION: names, RECOMPUTATION: names, MICRO_BATCH: []}


def test_passes_that_should_count_are_not_named() -> None:
    model = Counting()
    stateful = StatefulForwards(lambda: False, EVALUATION)
    stateful.know([("", model)])
    model(torch.ones(3))
    model.eval()
    model(torch.ones(3))  # with gradients: a model may be fine-tuned in evaluation mode
    assert stateful.plain() == {EVALUATION: [], RECOMPUTATION: [], MICRO_BATCH: []}
    assert float(model.count) == 2.0


class Balanced(nn.Module):
    """Counts its rows per expert. `update` changes the bias by the counts, and clears them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("state", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.counts += torch.tensor([3.0, 1.0, 2.0])
        self.state += x
        return self.weight * x + self.bias + self.state

    def update(self) -> None:
        self.bias += (self.counts.mean() - self.counts).sign()
        self.counts.zero_()


def accumulated(restores: str | None, *, per_micro_batch: bool) -> tuple[Tensor, StatefulForwards]:
    """Return the bias after two steps of three micro-batches."""
    model = Balanced()
    stateful = StatefulForwards(lambda: False, restores)
    stateful.know([("", nn.Sequential(model))])
    root = next(iter(stateful._roots))
    for _ in range(2):
        for number in range(3):
            root(torch.ones(2, 3)).sum().backward()
            model.state.zero_()  # it belongs to the rows of a micro-batch
            if per_micro_batch or number == 2:
                model.update()
        stateful.stepped()
    return model.bias, stateful


def test_names_and_undoes_updates_between_micro_batches() -> None:
    expected, right = accumulated(None, per_micro_batch=False)
    assert right.plain()[MICRO_BATCH] == []
    wrong, stateful = accumulated(None, per_micro_batch=True)
    assert stateful.plain()[MICRO_BATCH] == ["0.bias"]
    assert torch.equal(wrong, 3 * expected)
    again, _ = accumulated(MICRO_BATCH, per_micro_batch=True)
    assert torch.equal(again, expected)
