"""States on a disk, and models built without memory: results do not change."""

import io
import os
import re
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Collectives
from shardwise.errors import ModelError, TierError
from shardwise.states.storage import storage
from tests.disk import on_a_disk
from tests.distributed.sharded import Block, Stack
from tests.distributed.test_engine import (
    ROWS,
    Branches,
    batch,
    close,
    mlp,
    same_weights,
    seeded,
    squares,
    train,
    train_plain,
)
from tests.tables import each_value

SPAN = 7
"""Elements; so few that every state here has many spans, some with a part of a tensor."""


def everything(row):
    """Return the settings that put all states of the row `row` on a disk, if it permits."""
    states = ["optimizer", "gradients", "params"][: max(1, row)]
    return {"zero": row} | {f"offload_{state}": f"nvme:{on_a_disk()}" for state in states}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def branches_case(world, row):
    """Parameters without a gradient in some steps: segments are cut inside spans."""
    storage.SPAN = SPAN

    def loss_of(model, x, step, rank):
        return model(x, (step + rank) % 3).square().mean()

    model, plain = seeded(Branches), seeded(Branches)
    engine = train(world, model, loss_of, steps=6, **everything(row))
    train_plain(plain, loss_of, size=world.size, steps=6)
    with engine.full_parameters():
        same_weights(model, plain)
    steps = {n: float(s["step"]) for n, s in engine.optimizer_state_dict()["state"].items()}
    assert len(set(steps.values())) > 1, "all parameters had the same number of steps"
    engine.close()


def changes_case(world, row):
    """Existing optimizer state, a new group during training, and plain training again."""
    storage.SPAN = SPAN

    def run(model, optimizer, backward, step):
        for number in range(6):
            if number == 3:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 3e-2})
            backward(model, number)
            step()

    def make():
        model = mlp()
        rest = [*model[0].parameters(), *model[4].parameters()]
        optimizer = torch.optim.AdamW(rest, lr=1e-2)
        model(batch(9)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        return model, optimizer

    model, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the new group is not trained yet
        engine = sw.Engine(model, optimizer, bucket_mb=0.001, **everything(row))
    plain, reference = make()

    def plain_backward(model, number):
        reference.zero_grad()
        model(batch(number)).square().mean().backward()

    run(
        model,
        optimizer,
        lambda m, n: engine.backward(m(world.share(batch(n))).square().mean()),
        engine.step,
    )
    run(plain, reference, plain_backward, reference.step)
    engine.close()
    same_weights(model, plain)
    mine, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in theirs.items():
        assert all(close(mine[number][key], value) for key, value in state.items())


def written_case(world, row):
    """full_parameters(write=True) and moving averages reach values on the disk."""
    storage.SPAN = SPAN
    model = mlp(torch.float32)
    engine = sw.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        precision="bf16",
        ema_decay=0.5,
        **everything(row),
    )
    with engine.full_parameters(write=True):
        model[0].weight.fill_(float(1 + world.rank))
    engine.backward(model(world.share(batch(0).float())).square().mean())
    engine.step()
    with engine.full_parameters(model[0]):
        trained = model[0].weight.clone()
    assert bool(((trained.float() - 1).abs() < 0.3).all()), "the masters were not told"
    with engine.ema(), engine.full_parameters():
        averaged = model[0].weight.clone()
    assert not torch.equal(averaged, trained)
    with engine.full_parameters():
        assert torch.equal(model[0].weight, trained)
    engine.close()


def averages_case(world, row):
    """Moving averages on the disk swap with the parameters, and back."""
    storage.SPAN = SPAN
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, ema_decay=0.75, **everything(row))
    assert engine._states.averages.memory_bytes == 0
    average = [p.clone() for p in mlp().parameters()]
    for step in range(3):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        with engine.full_parameters():
            trained = [p.detach().clone() for p in model.parameters()]
        average = [0.75 * old + 0.25 * new for old, new in zip(average, trained, strict=True)]
        with engine.ema(), engine.full_parameters():
            assert all(map(close, model.parameters(), average))
        with engine.full_parameters():
            assert all(map(torch.equal, model.parameters(), trained))
    engine.close()


@each_value(case=[branches_case, changes_case, written_case, averages_case], row=ROWS, size=[2, 1])
def test_on_a_disk(group, case, row, size):
    before = set(os.listdir(on_a_disk()))
    group(size)(case, row)
    assert not [name for name in set(os.listdir(on_a_disk())) - before if "shardwise" in name]


def refused_case(world):
    model, disk = mlp(), f"nvme:{on_a_disk()}"
    for settings in (
        {"zero": 1, "offload_optimizer": disk},
        {"zero": 2, "offload_gradients": disk, "offload_optimizer": "cpu"},
        {"zero": 3, "offload_params": disk, "offload_optimizer": "cpu"},
    ):
        whole = torch.optim.Adafactor(model.parameters())
        with pytest.raises(ModelError, match="Adafactor needs whole tensors") as error:
            sw.Engine(model, whole, **settings)
        advised = re.findall(r"--(offload-\w+) cpu", str(error.value))
        assert advised
        instead = {name.replace("-", "_"): "cpu" for name in advised}
        engine = sw.Engine(model, whole, **settings | instead)
        engine.backward(model(world.share(batch(0))).square().mean())
        engine.step()
        engine.close()
    with pytest.raises(TierError, match=r"/no/such.*Make the folder"):
        sw.Engine(model, adamw(model), zero=1, offload_optimizer="nvme:/no/such")


def test_refuses_states_that_a_disk_cannot_store(group):
    group(1)(refused_case)


# -- built without memory -----------------------------------------------------------------------


class Built(nn.Module):
    """A model whose values are initialised in several ways."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.randn(6))
        nn.init.orthogonal_(self.blocks[1][0].weight)

    def forward(self, x):
        x = self.embed((x.abs() * 10).long().clamp(max=10)) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def without_memory_case(world, row, precision):
    """Draw different numbers on each rank. Rank 0's apply on all ranks, as in a plain build."""

    def build(meta):
        torch.manual_seed(5 + world.rank)
        if not meta:
            return Built()
        with sw.on_meta():
            return Built()

    ends = []
    for meta in (False, True):
        model = build(meta)
        engine = sw.Engine(model, adamw(model), zero=row, precision=precision, bucket_mb=0.001)
        for step in range(3):
            engine.backward(squares(model, world.share(batch(step).float()), step, world.rank))
            engine.step()
        engine.close()
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@each_value(row=ROWS, precision=["fp32", "bf16"])
def test_built_without_memory(group, row, precision):
    group(2)(without_memory_case, row, precision)


def no_record_case(world, row):
    with torch.device("meta"):
        model = mlp(torch.float32)
    engine = sw.Engine(model, adamw(model), zero=row)
    engine.backward(model(world.share(batch(0).float())).square().mean())
    assert engine.step().loss > 0


@pytest.mark.parametrize("row", [0, 3])
def test_built_on_meta_without_a_record(group, row):
    group(2)(no_record_case, row)


# -- a table of it ------------------------------------------------------------------------------


def described_case(world):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    model.append(nn.Linear(64, 2))
    engine = sw.Engine(model, adamw(model), zero=3, offload_optimizer=f"nvme:{on_a_disk()}")
    table = sw.engine.describe.table_of(engine._spec, engine._states, "memory")
    os.environ["COLUMNS"] = "40"
    with redirect_stdout(io.StringIO()) as printed:
        engine.describe()
    engine.close()
    return [list(column.cells) for column in table.columns], printed.getvalue()


def test_describe_lists_units_and_bytes(group):
    (names, parameters, buckets, *states), printed = group(2)(described_case)[0]
    assert all(f" {cell} " in printed for column in (parameters, *states) for cell in column)
    assert names == ["the rest of Sequential", "0 to 2 (3 units)"]
    assert parameters == ["130", f"{3 * (64 * 64 + 64):,}"]
    assert buckets == ["1", "3"]
    half = 3 * (64 * 64 + 64) * 4 / 2
    assert [column[1] for column in states] == [
        f"{size / 1e3:.1f} kB" for size in (half, half, 2 * half)
    ]


# -- memory that is used again --------------------------------------------------------------------


WIDE = 48
"""Features, so many that a bucket does not fit into a message."""


def settled_case(world, row, tier):
    """After two steps no buffer is allocated: transports lend memory once."""
    asked = []
    kinds = {type(world.collectives), Collectives}
    usual = {kind: vars(kind)["allocate"] for kind in kinds if "allocate" in vars(kind)}

    def counted(allocate):
        def count(group, numel, dtype, device, **options):
            asked.append(numel)
            return allocate(group, numel, dtype, device, **options)

        return count

    model = seeded(lambda: Stack(blocks=4, width=WIDE, block=lambda: Block(WIDE)))
    for kind, allocate in usual.items():
        kind.allocate = counted(allocate)
    try:
        engine = sw.Engine(model, adamw(model), bucket_mb=0.1, **tier_of(row, tier))
        for step in range(6):
            if step == 2:
                assert asked, "nothing was counted"
                asked.clear()
            engine.backward(squares(model, world.share(batch(step, width=WIDE)), step, world.rank))
            engine.step()
        engine.close()
    finally:
        for kind, allocate in usual.items():
            kind.allocate = allocate
    assert asked == []


def tier_of(row, tier):
    return everything(row) if tier == "nvme" else {"zero": row}


@each_value(row=ROWS, tier=["device", "nvme"], transport=["shared", "gloo"])
def test_steps_allocate_no_buffers(group, row, tier, transport):
    group(2, transport=transport)(settled_case, row, tier)
