"""Nested full_parameters blocks with each ZeRO stage: the outer block keeps its values."""

import copy

import pytest
import safetensors.torch
import torch

import shardwise as sw
from shardwise.errors import UsageError
from tests.distributed.sharded import Stack, every_size, on


def built(zero):
    torch.manual_seed(4)
    model = Stack()
    plain = copy.deepcopy(model)
    return sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero), model, plain


def same(model, plain):
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def reads_case(world, zero, folder):
    engine, model, plain = built(zero)
    with engine.full_parameters():
        state = engine.model_state_dict()
        same(model, plain)
        engine.export(f"{folder}/whole.safetensors")
        same(model, plain)
        with engine.full_parameters(model.blocks[1]):
            same(model, plain)
        same(model, plain)
    with engine.full_parameters(model.head), engine.full_parameters():
        same(model, plain)
    world.barrier()
    saved = safetensors.torch.load_file(f"{folder}/whole.safetensors")
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name], value)
        if world.is_main:
            assert torch.equal(state[name], value)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(model(x), plain(x))
    engine.backward(model(x).square().mean())
    engine.step()
    engine.close()


@every_size
def test_an_inner_read_leaves_the_outer_block_whole(group, ranks, tmp_path):
    for zero in (2, 3):
        on(group, ranks)(reads_case, zero, str(tmp_path))


def writes_case(world, zero):
    """Values written in the inner block, or before it, are stored by the outer block."""
    engine, model, _ = built(zero)
    with engine.full_parameters(write=True):
        model.head.weight.fill_(2.0 + world.rank)
        state = engine.model_state_dict()
        with engine.full_parameters(model.stem, write=True):
            model.stem.bias.fill_(5.0)
        with engine.full_parameters():
            assert bool((model.stem.bias == 5).all())
    if world.is_main:
        assert bool((state["head.weight"] == 2).all())
    with engine.full_parameters():
        assert bool((model.head.weight == 2).all())
        assert bool((model.stem.bias == 5).all())
    engine.close()


@every_size
def test_the_outer_block_stores_inner_writes(group, ranks):
    for zero in (1, 3):
        on(group, ranks)(writes_case, zero)


def refusals_case(world):
    engine, model, _ = built(3)
    with (
        engine.full_parameters(),
        pytest.raises(UsageError, match=r"inside a full_parameters\(\) block that is read-only"),
        engine.full_parameters(write=True),
    ):
        pass
    with (
        engine.full_parameters(model.head, write=True),
        pytest.raises(UsageError, match="gathers another part of the model"),
        engine.full_parameters(write=True),
    ):
        pass
    with engine.full_parameters():
        assert model.head.weight.numel() == 12
    engine.close()
    averaged = Stack()
    optimizer = torch.optim.SGD(averaged.parameters(), lr=0.1)
    engine = sw.Engine(averaged, optimizer, zero=3, ema_decay=0.9)
    with (
        engine.full_parameters(),
        pytest.raises(UsageError, match=r"ema\(\) inside engine\.full_parameters"),
        engine.ema(),
    ):
        pass
    engine.close()


def test_invalid_nestings_are_refused(group):
    group(2)(refusals_case)
