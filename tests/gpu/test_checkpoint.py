"""Checkpoints of states on a GPU, and of offloaded states."""

import pytest
import torch

import shardwise as sw
from tests.gpu.training import alone, batch, build, loss_of, needs_gpu, tiers

pytestmark = needs_gpu

CASES = [(0, {}), (3, {}), (2, {"optimizer": "cpu"}), (3, {"optimizer": "cpu", "params": "cpu"})]


def case(world, folder, row, named, background):
    """Saved, trained on, loaded again: the same bits from there on, and under another row."""
    with alone(world):
        told = []
        model, optimizer = build(world)
        engine = sw.Engine(model, optimizer, zero=row, precision="bf16", **tiers(**named))

        def train(steps):
            for step in steps:
                x, y = batch(world, step)
                engine.backward(loss_of(model, x, y))
                told.append(engine.step().loss)

        train(range(3))
        path = engine.save(folder, background=background)
        train(range(3, 6))
        first = told[3:]
        engine.load(path)
        told.clear()
        train(range(3, 6))
        assert told == first
        engine.close()
        other, optimizer = build(world)
        engine = sw.Engine(other, optimizer, zero=0 if row else 3, precision="bf16")
        engine.load(path)
        model, told = other, []
        train(range(3, 6))
        assert torch.allclose(torch.tensor(told), torch.tensor(first), rtol=1e-3)
        engine.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("row_and_tiers", CASES, ids=str)
def test_on_a_gpu(group, tmp_path, row_and_tiers, background):
    group(1, device="cuda")(case, tmp_path, *row_and_tiers, background, limit=120)
