"""Sharded parameters: models of every kind train as in a single process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from tests.distributed.sharded import (
    WIDTH,
    Block,
    Stack,
    agree,
    at_rest,
    batch,
    buffers_made,
    by_turns,
    every_size,
    on,
    seeded,
    sharded,
    squares,
    train,
    units_of,
)


def tokens(x):
    return (x.abs() * 5).long().clamp(max=10)


class Tied(Stack):
    """The head's weight is the embedding's, and two blocks share a layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[2].up = self.blocks[0].up

    def forward(self, x):
        x = self.stem(self.embed(tokens(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(Block):
    """A frozen block with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x):
        return super().forward(x) + x @ self.a @ self.b


class Adapters(Stack):
    def __init__(self):
        super().__init__(block=Adapted)
        self.stem.requires_grad_(False)


class FrozenBelow(Stack):
    """Whole units are frozen; gradients still flow through one of them."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class Attending(nn.Module):
    """Uses the weights of a child without calling it, like MultiheadAttention with out_proj."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.unsqueeze(1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.linear(x, self.child.weight, self.child.bias).squeeze(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.layers(x.unsqueeze(1))).squeeze(1)


class OutsideUse(Stack):
    """A parent that uses weights of its children, and other weights of the model in the loss."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.stem.weight) @ self.head.weight.t()


class Twice(Stack):
    def forward(self, x):
        a, b, c = self.blocks
        return self.head(b(a(c(a(self.stem(x))))))


class Nested(nn.Module):
    """Blocks inside blocks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inner[0](x)
        return self.inner[1](self.mix(x).tanh())


class Odd(Stack):
    """Parameters without dims, without elements, of another dtype, and one that no module uses."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.single = nn.Parameter(torch.ones(1))
        self.whole = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex128))

    def forward(self, x):
        assert self.whole.tolist() == [0, 1, 2, 3]
        assert self.flag.tolist() == [True, False]
        turned = (x.to(self.turn.dtype) @ self.turn).abs()
        return super().forward(x) * self.scale * self.single + turned * self.whole[2]


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Tanh()) for _ in range(2)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.view(-1, 1, 2, 3)
        for block in self.blocks:
            x = block(x)
        return x


def sequence():
    return nn.Sequential(*(Block() for _ in range(3)))


def without_units():
    return nn.Linear(WIDTH, 2)


def attention():
    return nn.Sequential(Attending(), Attending())


MODELS = [
    Stack,
    Tied,
    Adapters,
    FrozenBelow,
    Encoder,
    OutsideUse,
    Twice,
    Odd,
    ChannelsLast,
    sequence,
    without_units,
    attention,
]


@by_turns(make=MODELS)
def test_models(group, ranks, make):
    on(group, ranks)(agree, make)


def loss_with_a_weight(model, x, step, rank):
    """Return a loss that uses weights outside all units after forward."""
    return (model(x) @ model.head.weight).square().mean() + model.stem.bias.square().sum()


@every_size
def test_a_weight_in_the_loss(group, ranks):
    on(group, ranks)(agree, Stack, loss_with_a_weight)


# -- units ------------------------------------------------------------------------------------


def found_units(world):
    model = seeded(Stack)
    engine = sharded(model)
    assert units_of(engine) == ["the rest of Stack", "blocks.0", "blocks.1", "blocks.2"]


def named_units(world, patterns, names):
    assert agree(world, nested, units=patterns) == ["the rest of Sequential", *names]


class Contained(nn.Module):
    """Blocks in containers that no code calls, each with a parameter."""

    def __init__(self, container):
        super().__init__()
        self.rows = nn.ModuleList()
        for _ in range(3):
            pair = {"a": Block(), "b": nn.Linear(WIDTH, WIDTH)}
            row = nn.ModuleDict(pair) if container == "dict" else nn.ModuleList(pair.values())
            row.scale = nn.Parameter(torch.ones(WIDTH))
            self.rows.append(row)

    def forward(self, x):
        for row in self.rows:
            block, linear = row.values() if isinstance(row, nn.ModuleDict) else row
            x = x + linear(block(x) * row.scale)
        return x


def contained_units(world, container, patterns, names):
    found = agree(world, lambda: Contained(container), units=patterns)
    assert found == ["the rest of Contained", *names]


def nested():
    return nn.Sequential(Nested(), nn.Sequential(Nested(), nn.Linear(WIDTH, WIDTH)))


def no_such_unit(world):
    with pytest.raises(ConfigError, match=r"no module with parameters is called layer\.\*"):
        sharded(seeded(nested), units=["layer.*"])
    world.engines = 0


def test_units_are_found(group):
    on(group, "2 gloo")(found_units)


@by_turns(
    units=[
        (["0", "0.inner.*"], ["0", "0.inner.0", "0.inner.1"]),
        (["*.mix", "1.0*", "1.?.m*"], ["0.mix", "1.0", "1.0.mix"]),
        (["*.*.inner.1"], ["1.0.inner.1"]),
    ],
)
def test_units_by_name(group, ranks, units):
    on(group, ranks)(named_units, *units)


@by_turns(
    case=[
        ("dict", None, ["rows.0.a", "rows.1.a", "rows.2.a"]),
        ("list", None, ["rows.0.0", "rows.1.0", "rows.2.0"]),
        ("list", ["rows.1", "rows.2"], ["rows.1.0", "rows.1.1", "rows.2.0", "rows.2.1"]),
    ],
)
def test_children_of_a_container_without_forward_are_units(group, ranks, case):
    on(group, ranks)(contained_units, *case)


def test_pattern_without_a_match(group):
    on(group, "2 gloo")(no_such_unit)


# -- memory of a rank -------------------------------------------------------------------------


def one_unit_at_a_time(world):
    """Inside a block the other blocks are at rest; after a step all are."""
    model = seeded(Stack)
    seen = []

    def look(module, args, output):
        seen.append([at_rest(b.up.weight) for b in model.blocks])

    for block in model.blocks:
        block.register_forward_hook(look)
    engine = sharded(model)
    train(world, engine, model, squares, range(3))
    assert seen == 3 * [[False, True, True], [True, False, True], [True, True, False]]
    assert all(map(at_rest, model.parameters()))


def few_buffers(world):
    """After the first steps, no pass allocates a buffer for gathered buckets."""
    model = seeded(Tied)
    engine = sharded(model)
    train(world, engine, model, squares, range(2))
    made = buffers_made(engine)
    train(world, engine, model, squares, range(6))
    with torch.no_grad():
        model(batch(0))
    train(world, engine, model, squares, range(2))
    assert buffers_made(engine) == made
    assert made <= 4 * max(len(u.buckets) for u in engine._states.shown.residency.units)


def a_third_each(world):
    model = seeded(Stack)
    bytes_of_all = sum(p.numel() * p.element_size() for p in model.parameters())
    parameters = sharded(model)._states.parameters
    padding = 64 * 8 * len(parameters.sharded_buckets)
    assert (
        bytes_of_all <= world.size * parameters.state_bytes <= bytes_of_all + world.size * padding
    )
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) < bytes_of_all * 2


@every_size
def test_units_are_whole_only_when_needed(group, ranks):
    on(group, ranks)(one_unit_at_a_time)


@every_size
def test_no_pass_allocates(group, ranks):
    on(group, ranks)(few_buffers)


@every_size
def test_rank_stores_only_its_part(group, ranks):
    on(group, ranks)(a_third_each)
