"""Activations that are recomputed or offloaded to host or disk on a GPU give identical bits."""

import pytest
import torch

import shardwise as sw
from shardwise.model import activation_offload
from tests.disk import on_a_disk
from tests.gpu.training import batch, build, loss_of, needs_gpu

pytestmark = needs_gpu

WIDE = {"width": 256, "rows": 512}
"""Sizes at which saved tensors exceed 64 KB. Smaller tensors are not offloaded."""

ON_THE_WAY = 2**20
"""Bytes that may be in transit or prefetched. The default is as much as this model saves."""


def trained(world, row, settings):
    world.engines = 0  # the randomness of a step depends on the number of its engine
    model, optimizer = build(world, width=256, blocks=6, drop=0.1)
    engine = sw.Engine(model, optimizer, zero=row, **settings)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in range(3):
        engine.backward(loss_of(model, *batch(world, step, **WIDE)))
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    with engine.full_parameters():
        values = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    engine.close()
    return values, peak


def same_bits(world, row, settings):
    trained(world, row, {})  # libraries take their workspace
    kept, most = trained(world, row, {})
    bounds = activation_offload.LEAVING, activation_offload.AHEAD
    activation_offload.LEAVING = activation_offload.AHEAD = ON_THE_WAY
    try:
        moved, peak = trained(world, row, settings)
    finally:
        activation_offload.LEAVING, activation_offload.AHEAD = bounds
    assert all(map(torch.equal, kept, moved))
    assert peak < most


@pytest.mark.parametrize("row", [0, 2, 3])
@pytest.mark.parametrize("how", ["recomputed", "cpu", "nvme", "recomputed and cpu"])
def test_the_same_bits_in_less_memory(group, how, row):
    settings = {"activations": "recomputed"} if "recomputed" in how else {}
    if how.endswith("cpu"):
        settings["offload_activations"] = "cpu"
    if how == "nvme":
        settings["offload_activations"] = f"nvme:{on_a_disk()}"
    group(1, device="cuda")(same_bits, row, settings)
