"""Two engines in one process, each with a small model."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import Engine
from shardwise.world import preemption
from shardwise.world.world import World


@pytest.fixture
def engines(solo: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    monkeypatch.setattr(preemption, "SIGNALS", ())  # no handlers in this process
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    made = [
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        for model in models
    ]
    yield made
    for engine in made:
        engine.close()


def step(engine: Engine) -> None:
    (model,) = engine._spec.models
    engine.backward(model(torch.ones(4, 2)).mean())
    engine.step()
