"""Asked to end in a loop in which several engines step."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import preemption
from shardwise.world import World


def test_the_body_of_a_loop_is_finished_first(
    solo: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine makes all of its steps of a batch, as after a resume it would not."""
    monkeypatch.setattr(preemption, "SIGNALS", ())  # no handlers in this process
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    engines = [
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        for model in models
    ]
    both = sw.Engines(first=engines[0], second=engines[1])
    both.save(tmp_path)
    solo.preemption.asked = signal.SIGTERM
    loader = sw.Loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
    engines[0].track(loader=loader)

    def train() -> None:
        for (x,) in loader:
            for number in (0, 1, 1):
                engines[number].backward(models[number](x).mean())
                engines[number].step()

    with pytest.raises(SystemExit):
        train()
    assert [engine.steps for engine in engines] == [1, 2]
    assert (tmp_path / "together-2.json").is_file()
    for engine in engines:
        engine.close()
