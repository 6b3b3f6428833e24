"""Sharded parameters with torch.compile: blocks become graphs, units are gathered around them."""

import copy
import warnings
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from tests.distributed.sharded import (
    Stack,
    adamw,
    batch,
    on,
    same_figures,
    seeded,
    sharded,
    squares,
    train,
    train_alike,
    train_plain,
)

WHOLE_BLOCK = 4
"""The number of calls in the graph of a block's forward: norm, up, tanh, down and sum.

One of them is a method.
"""


two_groups = pytest.mark.parametrize("ranks", ["2 gloo", "3 shared"])


class Backend:
    """Runs graphs unchanged, and records the number of calls in each."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph


def blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrapped_blocks(model, backend):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def whole(model, backend):
    model.compile(backend=backend)
    return model


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def start_afresh():
    torch._dynamo.reset()
    # Dynamo itself inspects it, for any input that is not a leaf.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")


def compiled(world, compile_it, first):
    """Compile before the engine is made, or after it."""
    start_afresh()
    backend = Backend()
    model, plain = seeded(Stack), seeded(Stack)
    run = compile_it(model, backend) if first else model
    engine = sharded(run)
    if not first:
        run = compile_it(model, backend)
    optimizer = adamw(plain)
    for step in range(4):
        mine = train(world, engine, run, squares, [step])
        theirs = train_plain(plain, optimizer, squares, [step], size=world.size)
        assert same_figures(mine, theirs)
        with torch.no_grad():
            assert torch.allclose(run(batch(9)), plain(batch(9)), rtol=1e-9)
    assert WHOLE_BLOCK in backend.graphs
    with engine.full_parameters():
        twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.allclose(twin(batch(9)), plain(batch(9)), rtol=1e-9)


def by_the_engine(world):
    start_afresh()
    backend = Backend()
    model, plain = seeded(Stack), seeded(Stack)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        engine = sharded(model, compile=True)
    train_alike(world, engine, model, plain, adamw(plain), range(4))
    assert set(backend.graphs) == {WHOLE_BLOCK}


OFTEN = {
    "2 gloo": [(wrapped_blocks, True), (whole, False)],
    "3 shared": [(blocks, True), (wrapped, False)],
}
"""Ways and times of compilation, each once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "compile_it", "first"),
    [
        pytest.param(ranks, *case, marks=() if case in often else pytest.mark.full)
        for ranks, often in OFTEN.items()
        for case in [*product([blocks, whole, wrapped], [True, False]), (wrapped_blocks, True)]
    ],
)
def test_compiled(group, ranks, compile_it, first):
    on(group, ranks)(compiled, compile_it, first)


@two_groups
def test_compiled_by_the_engine(group, ranks):
    on(group, ranks)(by_the_engine)
