"""Which buffers change in evaluations and recomputations, and their restoration."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.tools.verify.stock.stateful_forwards import (
    EVALUATION,
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
    assert stateful.plain() == {EVALUATION: ["net.count"], RECOMPUTATION: ["net.count"]}


def test_passes_that_should_count_are_not_named() -> None:
    model = Counting()
    stateful = StatefulForwards(lambda: False, EVALUATION)
    stateful.know([("", model)])
    model(torch.ones(3))
    model.eval()
    model(torch.ones(3))  # with gradients: a model may be fine-tuned in evaluation mode
    assert stateful.plain() == {EVALUATION: [], RECOMPUTATION: []}
    assert float(model.count) == 2.0
