"""Activations recomputed or offloaded over real ranks give the same results as kept ones."""

import shutil
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.model import activation_offload
from tests.distributed.test_engine import batch
from tests.tables import each_value

WAYS = {
    "recomputed": {"activations": "recomputed"},
    "nvme": {"offload_activations": "nvme:{folder}"},
    "recomputed, nvme": {"activations": "recomputed", "offload_activations": "nvme:{folder}"},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.narrow = nn.Linear(12, 6)

    def forward(self, x, *, gain):
        hidden = F.silu(self.norm(self.wide(x)))
        return x + gain * F.dropout(self.narrow(hidden), 0.2, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x, gain=self.gain)
        return x


def trained(world, settings, *, rows=13, micro=4, two_at_once=False):
    """Return the full state after some steps, and the next random numbers of each rank."""
    activation_offload.LEAST = 64
    if settings.get("compile"):
        torch.compiler.reset()  # else torch runs a block eagerly after too many compilations
    world.engines = 0  # a step's random numbers depend on the number of its engine
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, bucket_mb=0.001, quiet=True, **settings)
    data = torch.utils.data.TensorDataset(batch(0, 2 * rows).float())
    for step in sw.Loader(data, batch_size=rows, micro_batch_size=micro).steps():
        losses = []
        for (x,) in step:
            losses.append(model(x).square().mean())
            if not two_at_once:
                engine.backward(losses.pop())
        if losses:
            engine.backward(sum(losses), weight=1)
        with torch.no_grad():
            model(batch(9).float())
        engine.step(max_norm=1.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.rand(2)
    optimizer_state = engine.optimizer_state_dict()["state"]
    engine.close()
    return [*state.values(), drawn, *(t for s in optimizer_state.values() for t in s.values())]


def alike_case(world, folder, common, ways=tuple(WAYS), **options):
    kept = trained(world, common, **options)
    for way in ways:
        filled = {name: text.format(folder=folder) for name, text in WAYS[way].items()}
        got = trained(world, common | filled, **options)
        assert len(got) == len(kept)
        for index, (one, other) in enumerate(zip(got, kept, strict=True)):
            assert torch.equal(one, other), f"{way}: tensor {index} differs"


SYNC = {"sync_batch_norm": True}
"""Micro-batches also differ in size, and some ranks get a stand-in."""

LOCAL = {"rows": 12, "micro": None}
"""No rank gets a single row, which has no variance."""


@each_value(size=[2, 3], zero=[0, 1, 2], way=WAYS)
def test_every_row(group, tmp_path, size, zero, way):
    group(size)(alike_case, str(tmp_path), SYNC | {"zero": zero}, [way], limit=120)


def local_case(world, folder):
    alike_case(world, folder, {"zero": 1}, **LOCAL)


@pytest.mark.parametrize("size", [1, 2])
def test_statistics_of_each_rank(group, tmp_path, size):
    group(size)(local_case, str(tmp_path), limit=120)


@each_value(precision=["bf16-mixed", "bf16", "fp16-mixed"], way=WAYS)
def test_every_precision(group, tmp_path, precision, way):
    settings = SYNC | {"zero": 1, "precision": precision}
    group(2)(alike_case, str(tmp_path), settings, [way], limit=120)


def several_forwards_case(world, folder):
    """SyncBatchNorm communicates in forward only. By the time of the recomputation the current
    batch is another one, for example a stand-in."""
    alike_case(world, folder, SYNC | {"zero": 1}, two_at_once=True)


def test_two_forwards_before_one_backward(group, tmp_path):
    group(3)(several_forwards_case, str(tmp_path), limit=120)


def compiled_case(world, folder, backend, ways):
    """Test with torch.compile. `backend` selects the compiler of the graphs, if any."""
    compile_it = partial(torch.compile, backend=backend)
    with warnings.catch_warnings(), mock.patch.object(torch, "compile", compile_it):
        warnings.simplefilter("ignore")  # torch's compiler warns about its own code
        alike_case(world, folder, {"zero": 1, "compile": True}, ways, **LOCAL)


def test_units_as_graphs(group, tmp_path):
    group(1)(compiled_case, str(tmp_path), "aot_eager", ["recomputed, nvme"])


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on the CPU")
def test_compiled_units(group, tmp_path):
    group(2)(compiled_case, str(tmp_path), "inductor", list(WAYS), limit=240)
