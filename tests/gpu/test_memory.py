"""Device memory, compared with the table of the ZeRO paper (Rajbhandari et al., 2020)."""

import gc

import pytest
import torch

import shardwise as sw
from tests.gpu.training import batch, build, loss_of, needs_gpu, tiers

pytestmark = needs_gpu

WIDTH, BLOCKS, BUCKET_MB = 1024, 8, 8.0
MB = 2**20

SLACK = 4 * BUCKET_MB * MB + 3 * (2 * WIDTH * 2 * WIDTH * 4) + 40 * MB
"""Beside the states: buckets on their way, units gathered, gradients that autograd has just made,
workspaces of libraries."""


def held(world, row, named):
    """Bytes of parameters, of device memory between steps and at the peak of a step; and whether
    the device holds optimizer state."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, optimizer = build(world, width=WIDTH, blocks=BLOCKS)
    count = sum(parameter.numel() for parameter in model.parameters())
    engine = sw.Engine(model, optimizer, zero=row, bucket_mb=BUCKET_MB, **tiers(**named))
    for step in range(3):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        x, y = world.share(batch(world, step, width=WIDTH, rows=8))
        engine.backward(loss_of(model, x, y))
        engine.step()
    torch.cuda.synchronize()
    between, peak = (
        torch.cuda.memory_allocated() - before,
        torch.cuda.max_memory_allocated() - before,
    )
    states = engine._states.optimizer
    tensors = [each.master.device for each in states.intervals if each.has_master]
    tensors += [
        value.device
        for inner in states.inners
        for state in inner.inner.state.values()
        for value in state.values()
    ]
    engine.close()
    return count, between, peak, any(device.type == "cuda" for device in tensors)


def expected(count, size, row, named):
    """Bytes of fp32 parameters, gradients and Adam's moments that rest on the device."""
    optimizer = named.get("optimizer", "device")
    rests = {
        "params": named.get("params", "device"),
        "gradients": named.get("gradients", optimizer if row >= 2 else "device"),
        "optimizer": optimizer,
    }
    bytes_of = {"params": (4, 3), "gradients": (4, 2), "optimizer": (8, 1)}
    return sum(
        width * count / (size if row >= first else 1)
        for state, (width, first) in bytes_of.items()
        if rests[state] == "device"
    )


@pytest.mark.parametrize(
    "named",
    [{}, {"optimizer": "cpu"}, {"optimizer": "nvme"}, {"optimizer": "cpu", "params": "cpu"}],
    ids=str,
)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_the_device_holds_what_the_formula_says(group, size, row, named):
    if "params" in named and row < 3:
        pytest.skip("replicated parameters are in use, whole")
    settings = {"transport": "gloo"} if size > 1 else {}
    for count, between, peak, has_optimizer in group(size, device="cuda", **settings)(
        held, row, named, limit=120
    ):
        formula = expected(count, size, row, named)
        assert formula * 0.98 <= peak
        assert between <= formula * 1.02 + SLACK
        assert peak <= formula * 1.02 + SLACK
        assert has_optimizer == (named.get("optimizer", "device") == "device")
