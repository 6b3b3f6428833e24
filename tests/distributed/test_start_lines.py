"""The lines at the start of a run: units, bytes and tiers of a model."""

import contextlib
import io
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import start_lines
from shardwise.messages.printable import in_bytes
from tests.disk import on_a_disk
from tests.distributed.group import RankFailed
from tests.distributed.test_engine import ROWS

WIDTH = 128
BLOCK = WIDTH * WIDTH + WIDTH
"""Parameters of a block and of the rest. Half of them is a multiple of 64: no padding."""


def blocks(rest=True):
    """Return a model of three units, and with `rest` another layer."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    return model.append(nn.Linear(WIDTH, WIDTH)) if rest else model


def started(model, *, optimizer=torch.optim.AdamW, **settings):
    """Create an engine, and return it with the second of its lines."""
    said = io.StringIO()
    trained = [p for p in model.parameters() if p.requires_grad]
    with contextlib.redirect_stdout(said):
        engine = sw.Engine(model, optimizer(trained, lr=1e-3), quiet=False, **settings)
    return engine, said.getvalue().splitlines()[1] if said.getvalue() else ""


def line_case(world, rest, settings):
    engine, line = started(blocks(rest), **settings)
    engine.close()
    return line


def line(group, *, size=2, rest=True, **settings):
    return group(size)(line_case, rest, settings)[0]


def test_names_no_tier_if_all_states_are_on_the_device(group):
    assert line(group) == "  model: 66.0k parameters in 4 units, state 1.1 MB per worker"
    assert line(group, zero=1) == (
        "  model: 66.0k parameters in 4 units, state 792.6 kB per worker (replicated: 1.1 MB)"
    )


def tiny_case(world):
    """A model that is smaller than its padding, and accumulated batches."""
    model, said = nn.Linear(3, 1), io.StringIO()
    with contextlib.redirect_stdout(said):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = sw.Engine(model, sgd, zero=2, quiet=False)
        for _ in range(6):
            engine.backward(model(world.share(torch.ones(4, 3))).square().mean())
    engine.zero_grad()
    engine.close()
    return said.getvalue().splitlines()[1:3]


def test_names_padding_and_accumulated_batches(group):
    """The line names padding, and does not call 6 batches of 4 rows a batch of 4."""
    model, batch = group(2)(tiny_case)[0]
    assert "1 unit, state 192 B per worker (padding included; replicated: 32 B)" in model
    assert batch == (
        "  batch: 4 = 2 workers x 1 micro-batch x 2 of each world.share; those before one "
        "engine.step() are added"
    )


def kinds_case(world, weight):
    """A step with two batches, whose losses are means over elements and over rows."""
    model, said = nn.Linear(3, 4), io.StringIO()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=False)
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            x = world.share(torch.ones(4, 3))
            engine.backward(model(x).square().mean(), weight=weight and len(x))
            x = world.share(torch.ones(4, 3))
            loss = nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64))
            engine.backward(loss, weight=weight and len(x))
            stats = engine.step()
    engine.close()
    return said.getvalue(), stats.weight


def test_refuses_means_over_different_kinds_of_items_without_weights(group):
    with pytest.raises(RankFailed, match=r"different kinds of items \(mean, cross_entropy\)"):
        group(2)(kinds_case, None)
    said, weight = group(2)(kinds_case, True)[0]
    assert "different kinds" not in said
    assert weight == 8


def test_states_on_a_disk(group):
    where = f"nvme:{on_a_disk()}"
    known = "  model: 66.0k parameters in 4 units, state 528.4 kB per worker (replicated: 1.1 MB)"
    assert line(group, zero=3, offload_optimizer=where) == (
        f"{known}, of which on {where}: gradients 132.1 kB, optimizer state 264.2 kB"
    )
    assert line(group, zero=3, offload_params=where, offload_optimizer=where) == (
        f"{known}, of which on {where}: "
        "parameters 132.1 kB, gradients 132.1 kB, optimizer state 264.2 kB"
    )


def test_states_on_two_tiers(group):
    """On a rank that computes on the CPU, the tier cpu is the device."""
    where = f"nvme:{on_a_disk()}"
    assert line(group, zero=3, offload_params=where, offload_optimizer="cpu").endswith(
        f", of which on {where}: parameters 132.1 kB; on cpu (the device of these workers, so "
        "nothing moves): gradients 132.1 kB, optimizer state 264.2 kB"
    )


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("rest", "units", "said"),
    [
        (True, None, "4 units"),
        (False, None, "3 units"),
        (True, ["0", "2"], "3 units"),
        (False, ["*"], "3 units"),
    ],
)
def test_units_are_counted(group, row, rest, units, said):
    assert f" in {said}, " in line(group, zero=row, rest=rest, units=units)


def bytes_case(world, settings, momentum):
    """Return bytes by state. SGD has no state here, so all bytes exist from the start."""
    model = blocks()
    model[1].requires_grad_(False)
    engine, _ = started(model, optimizer=partial(torch.optim.SGD, momentum=momentum), **settings)
    states = engine._states
    if not momentum:
        assert states.expected_bytes() == engine.state_bytes
    table = sw.engine.describe.table_of(engine._spec, states, "memory")
    engine.close()
    by_state = states.bytes_by_state()
    told = [column.footer for column in table.columns]
    assert told[3:] == [in_bytes(size) for size in by_state.values()]
    return told[1], list(by_state.values())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_bytes_are_those_of_the_states_and_of_the_table(group, row, ema, momentum):
    """Frozen parameters are sharded like the others."""
    settings = {"zero": row, "ema_decay": ema}
    numel, sizes = group(2)(bytes_case, settings, momentum)[0]
    trained, frozen = 3 * BLOCK, BLOCK if row == 3 else 0
    assert numel == f"{trained + frozen:,}"
    held, gradients, moments = (4 * trained // (2 if row >= least else 1) for least in (3, 2, 1))
    assert sizes == [held + 4 * frozen // 2, gradients, moments if momentum else 0]


def tiers_case(world, row):
    """Bytes on a disk count like bytes in memory."""
    states = ["optimizer", "gradients", "params"][: max(1, row)]
    settings = {"zero": row} | {f"offload_{state}": f"nvme:{on_a_disk()}" for state in states}
    found = []
    for chosen in ({"zero": row}, settings):
        engine, _ = started(blocks(), **chosen)
        found.append(engine._states.bytes_by_state())
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("row", [1, 2, 3])
def test_bytes_are_the_same_on_every_tier(group, row):
    group(2)(tiers_case, row)


def stages_case(world, *, at_once, settings):
    """Return the lines of the first backward of a model in pipeline stages."""
    model = blocks(rest=False)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=False, **settings)
    said, x = io.StringIO(), torch.ones(8, WIDTH)
    with contextlib.redirect_stdout(said):
        if at_once:
            engine.forward_backward(lambda x: model(x).mean(), x)
        else:
            engine.backward(model(x).mean())
    engine.step()
    return said.getvalue().splitlines()


def test_how_a_batch_goes_through_the_stages(group):
    spread = group(2, pipeline=2)
    (_, line) = spread(partial(stages_case, at_once=True, settings={}))[0]
    assert line == "  it goes through the stages in 8 parts"
    (_, line) = spread(partial(stages_case, at_once=False, settings={}))[0]
    assert line.startswith("  engine.backward runs stage after stage, one worker at a time: ")
    settings = {"microbatches": 4}
    (_, line) = spread(partial(stages_case, at_once=False, settings=settings))[0]
    assert ", and --microbatches has no effect: " in line


class OwnAdamW(torch.optim.AdamW):
    """A user's optimizer, which only a trial can classify."""


def tried_case(world, settings):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        model = blocks()
        sw.Engine(model, OwnAdamW(model.parameters()), quiet=False, **settings).close()
    return [line for line in said.getvalue().splitlines() if "OwnAdamW" in line]


def test_names_optimizers_whose_state_is_cut_after_a_trial(group):
    assert group(2)(tried_case, {"zero": 0})[0] == []
    assert group(1)(tried_case, {"zero": 2})[0] == []
    assert group(2)(tried_case, {"zero": 2})[0] == [
        "  OwnAdamW: its state is cut within tensors, because in a trial it updated each "
        "element independently; if later steps look at whole tensors: --zero 0"
    ]


class OwnLars(torch.optim.SGD):
    """Scales by the norms of full tensors, except tensors with one dimension."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                scale = p.norm() / p.grad.norm() if p.ndim > 1 else 1.0
                p.sub_(group["lr"] * scale * p.grad)


def lars_case(world):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        model = blocks()
        groups = [
            [p for p in model.parameters() if (p.ndim == 1) is flat] for flat in (False, True)
        ]
        optimizer = OwnLars([{"params": group} for group in groups], lr=0.1)
        sw.Engine(model, optimizer, quiet=False, zero=2).close()
    return [line for line in said.getvalue().splitlines() if "OwnLars" in line]


def test_names_the_group_that_is_cut(group):
    assert group(2)(lars_case)[0] == [
        "  OwnLars, parameter group 1: its state is cut within tensors, because in a trial it "
        "updated each element independently (tensors of group 0 stay whole); if later steps look "
        "at whole tensors: --zero 0"
    ]


class Pooled(nn.Module):
    """The mean of powers with the exponent `p`."""

    p = 0.5

    def forward(self, x):
        return x.clamp(min=1e-6).pow(self.p).mean(1, keepdim=True).pow(1 / self.p)


class Masked(nn.Module):
    """A module that drops rows with probability `p`."""

    p = 0.5

    def forward(self, x):
        return x * torch.rand(len(x), 1).gt(self.p)


class Functional(nn.Module):
    """A module that calls a function of torch with the probability `drop`."""

    def __init__(self, drop):
        super().__init__()
        self.drop = drop

    def forward(self, x):
        return nn.functional.dropout(x, self.drop, self.training)


class Attention(Functional):
    """Attention whose probability is a keyword argument."""

    def forward(self, x):
        p = self.drop if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)


class Scaled(Functional):
    """A module with an attribute `drop` that is not a probability."""

    def forward(self, x):
        return x * self.drop


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (Pooled(), False),
        (Functional(0.1), True),
        (Functional(0.0), False),
        (Attention(0.1), True),
        (Attention(0.1).eval(), False),
        (Scaled(0.1), False),
        (nn.PairwiseDistance(p=0.5), False),
        (Masked(), True),
        (nn.Dropout1d(0.5), True),
        (nn.Dropout(0.0), False),
        (nn.LSTM(WIDTH, 2, 2, dropout=0.5), True),
        (nn.Dropout(0.5).eval(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_p_is_a_dropout_probability_only_if_forward_draws(module, draws):
    reason = start_lines._reason(module, False, 1)
    said = "dropout: each worker draws its own mask, unless --exact V is set"
    assert reason == (said if draws else None)


def normed_case(world, micro):
    """Return the messages of the first backward pass of a model with synchronised BatchNorm."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters())
    engine = sw.Engine(model, optimizer, quiet=False, sync_batch_norm=True)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    said = io.StringIO()
    for step in sw.Loader(data, batch_size=24, micro_batch_size=micro).steps():
        for (x,) in step:
            with contextlib.redirect_stdout(said):
                engine.backward(model(x).mean())
        engine.step()
    engine.close()
    return said.getvalue()


def test_reports_synchronised_batch_norm_over_micro_batches(group):
    assert "BatchNorm" not in group(2)(normed_case, 12)[0]
    said = "BatchNorm, whose statistics are over each of 4 micro-batches of all workers"
    assert said in group(2)(normed_case, 3)[0]
