"""Optimizer state in 8 bits, compared with one plain process that rounds after each step."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.states.storage import storage
from tests.distributed.group import RankFailed

STEPS = 6
SPAN = 2048


class Model(nn.Module):
    """Parameters of odd sizes. `rare` is used only in some steps."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(37, 37) for _ in range(3))
        self.rare = nn.Linear(37, 41)
        self.head = nn.Linear(37, 3, bias=False)

    def forward(self, x, step):
        for block in self.blocks:
            x = x + block(x).tanh()
        loss = self.head(x).square().mean()
        return loss + self.rare(x).sin().mean() if step % 3 == 1 else loss


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.01, amsgrad=True)


def sgd(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "adamw": adamw,
    "sgd": sgd,
    "nadam": optim.NAdam,
    "radam": partial(optim.RAdam, lr=0.05),
    "adamax": optim.Adamax,
    "rmsprop": partial(optim.RMSprop, momentum=0.5, lr=1e-3),
}
SIGNED = ("exp_avg", "momentum_buffer")


def made(name):
    torch.manual_seed(5)
    model = Model().double()
    return model, OPTIMIZERS[name](model.parameters())


def batch(step):
    draw = torch.Generator().manual_seed(70 + step)
    return torch.randn(12, 37, generator=draw, dtype=torch.float64)


def values_of_codes(signed):
    """Return the dynamic map, computed as bitsandbytes does, with -1 instead of -0.993."""
    data = []
    for i in range(7):
        count = 2 ** (i if signed else i + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        data += (10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
    data = sorted(data)
    if signed:
        data[-1] = 1.0
        return torch.tensor([-v for v in data[::-1]] + [0.0] + data)
    return torch.tensor([0.0, *data, 1.0])


def rounded(value, signed):
    """Round blocks of 256 elements of `value` to 8 bits."""
    table = values_of_codes(signed).double()
    flat = value.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % 256)]).view(-1, 256)
    scale = padded.abs().amax(1, keepdim=True)
    quotients = (padded / scale.masked_fill(scale == 0, 1)).float().double()
    code = (quotients.unsqueeze(-1) - table).abs().argmin(-1)
    if not signed:
        code = torch.where((code == 0) & (quotients > 0), 1, code)
    return (table[code] * scale).flatten()[: len(flat)].view_as(value)


def plain(name, steps):
    model, optimizer = made(name)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step), step).backward()
        optimizer.step()
        for p, state in optimizer.state.items():
            if p.grad is not None:
                for key, value in state.items():
                    if value is not None and value.ndim:
                        state[key] = rounded(value, signed=key in SIGNED)
    return [p.detach() for p in model.parameters()]


def train(engine, model, world, steps):
    if world.settings.exact:
        rows = torch.cat([batch(step) for step in steps])
        loader = sw.Loader(TensorDataset(rows), batch_size=len(batch(0)))
        parts_by_step = zip(steps, loader.steps(), strict=True)
    else:
        parts_by_step = [(step, [(world.share(batch(step)),)]) for step in steps]
    for step, parts in parts_by_step:
        for (part,) in parts:
            engine.backward(model(part, step))
        engine.step()


def case(world, name, settings, steps=STEPS):
    storage.SPAN = SPAN  # several spans per bucket
    model, optimizer = made(name)
    engine = sw.Engine(model, optimizer, optimizer_state="8bit", bucket_mb=0.03, **settings)
    train(engine, model, world, range(steps))
    nbytes = engine._states.bytes_by_state()["optimizer"], engine._states.expected_bytes()
    assert nbytes[1] == engine.state_bytes
    with engine.full_parameters():
        values = [p.detach().clone() for p in model.parameters()]
    state = engine.optimizer_state_dict()["state"]
    engine.close()
    return values, state, nbytes[0]


@pytest.mark.parametrize(
    ("zero", "name"),
    [*product(range(4), ["adamw", "sgd"]), *product([2], ["nadam", "radam", "adamax", "rmsprop"])],
)
def test_equals_a_plain_process_that_rounds(group, zero, name):
    expected = plain(name, range(STEPS))
    values, state, _ = group(2 + zero % 2)(case, name, {"zero": zero})[0]
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-12)
    for entries in state.values():
        for key, value in entries.items():
            if value is not None and value.ndim:
                expected = rounded(value, signed=key in SIGNED)
                torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_bits_do_not_depend_on_workers_or_row(group):
    runs = [
        group(size, exact=4)(case, "adamw", {"zero": zero, "overlap": False}, 4)[0]
        for size, zero in [(1, 0), (2, 1), (2, 3), (4, 2)]
    ]
    for values, state, _ in runs[1:]:
        torch.testing.assert_close(values, runs[0][0], rtol=0, atol=0)
        torch.testing.assert_close(state, runs[0][1], rtol=0, atol=0)


def test_state_has_one_byte_per_element_and_scales(group):
    _, _, nbytes = group(1)(case, "sgd", {}, 2)[0]
    blocks = sum(math.ceil(p.numel() / 256) for p in Model().parameters())
    assert nbytes == blocks * (256 + 8)


def saving_case(world, folder, name, settings):
    storage.SPAN = SPAN
    model, optimizer = made(name)
    engine = sw.Engine(model, optimizer, bucket_mb=0.03, **settings)
    train(engine, model, world, range(STEPS))
    path = engine.save(folder)
    train(engine, model, world, range(STEPS, 2 * STEPS))
    with engine.full_parameters():
        return path, [p.detach().clone() for p in model.parameters()]


def loading_case(world, path, name, settings):
    storage.SPAN = SPAN
    model, optimizer = made(name)
    engine = sw.Engine(model, optimizer, bucket_mb=0.03, **settings)
    engine.load(path)
    state = engine.optimizer_state_dict()["state"]
    train(engine, model, world, range(STEPS, 2 * STEPS))
    with engine.full_parameters():
        return [p.detach().clone() for p in model.parameters()], state


def test_checkpoints_load_in_both_directions(group, tmp_path):
    small, full = {"optimizer_state": "8bit", "zero": 3}, {"zero": 1}
    saved, expected = group(2)(saving_case, tmp_path / "small", "adamw", small)[0]
    # The same bits at the same size, and the same values at others.
    again, state = group(2)(loading_case, saved, "adamw", small)[0]
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    other, state_of_other = group(3)(loading_case, saved, "adamw", small)[0]
    torch.testing.assert_close(other, expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(state_of_other, state, rtol=0, atol=0)
    _, in_full = group(2)(loading_case, saved, "adamw", full)[0]
    torch.testing.assert_close(in_full, state, rtol=0, atol=0)

    saved, _ = group(2)(saving_case, tmp_path / "full", "adamw", full)[0]
    _, state = group(3)(loading_case, saved, "adamw", full)[0]
    _, in_small = group(3)(loading_case, saved, "adamw", small)[0]
    for number, entries in state.items():
        for key, value in entries.items():
            expected = rounded(value, signed=key in SIGNED) if value.ndim else value
            torch.testing.assert_close(in_small[number][key], expected, rtol=0, atol=0)


def refused_case(world):
    del world
    model = nn.Linear(3, 3)
    for optimizer, text in [
        (optim.SGD(model.parameters()), "this SGD: SGD with these options keeps no state"),
        (optim.Adafactor(model.parameters()), "this Adafactor: it stores the state of"),
        (optim.Adagrad(model.parameters()), "this Adagrad: rounding the sum of Adagrad"),
    ]:
        with pytest.raises(ModelError, match=text):
            sw.Engine(model, optimizer, optimizer_state="8bit")
    adam = optim.Adam(model.parameters())
    with pytest.raises(ConfigError, match="8bit cannot be combined with --offload-optimizer nvme"):
        sw.Engine(model, adam, optimizer_state="8bit", offload_optimizer="nvme:/tmp")
    sw.Engine(model, adam, optimizer_state="8bit").close()


def test_refuses_state_that_must_not_be_rounded(group):
    group(1)(refused_case)


def guarded_case(world):
    model, optimizer = made("adamw")
    engine = sw.Engine(model, optimizer, optimizer_state="8bit", guard=1, guard_memory=True)
    train(engine, model, world, range(2))
    moments = engine._states.optimizer.intervals[0].moments["exp_avg"]
    if world.rank == 1:
        moments.codes.data.numpy()[300] ^= 8  # a write that torch does not count
    train(engine, model, world, range(2, 3))


def test_guard_finds_a_bit_that_flips_in_the_codes(group):
    with pytest.raises(RankFailed, match=r"exp_avg \(codes\)"):
        group(2)(guarded_case)
