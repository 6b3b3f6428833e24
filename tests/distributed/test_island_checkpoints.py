"""Checkpoints of islands: at any step, onto any number of islands."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from tests.distributed.test_islands import batches, flat, loss_of, mlp, optimizer_of

RULE = {"equal_every": 3, "outer": "nesterov:0.7,0.9", "bucket_mb": 1e-3}


def part_case(world, folder, first, last, settings, saves=()):
    """Make steps from `first` on; return losses, weights of this island, and anchor."""
    model = mlp()
    if settings.get("channels"):
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    settings = {key: value for key, value in settings.items() if key != "channels"}
    engine = sw.Engine(model, optimizer_of("adamw", model), **settings)
    assert engine.resume(folder) == first
    losses = []
    for step, batch in enumerate(batches(9)[first:last], first + 1):
        engine.backward(loss_of(model, world.share(batch)))
        losses.append(engine.step().loss)
        if step in saves:
            engine.save(folder, background=step % 2 == 0)
    with engine.full_parameters():
        mine = flat(model)
    with engine.anchor(), engine.full_parameters():
        anchor = flat(model)
    engine.close()
    return losses, mine, anchor


def same(found, expected):
    for (losses, *tensors), (theirs, *others) in zip(found, expected, strict=True):
        assert losses == theirs[-len(losses) :]
        for mine, other in zip(tensors, others, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        (3, {"zero": 0}),
        (4, {"zero": 0, "wire": "int8"}),
        (4, {"zero": 2, "wire": "int4", "late": 2}),
        (5, {"zero": 3, "late": 2, "channels": True, "wire": "bf16"}),
        (5, {"zero": 1, "precision": "bf16", "late": 1}),
        (4, {"zero": 0, "channels": True}),
    ],
    ids=str,
)
def test_resume_is_bit_exact(group, tmp_path, saved, settings):
    settings = RULE | settings
    ranks = group(4, islands=2)
    whole = ranks(part_case, tmp_path / "none", 0, 8, settings)
    same(ranks(part_case, tmp_path / "a", 0, 8, settings, (saved,)), whole)
    same(ranks(part_case, tmp_path / "a", saved, 8, settings), whole)


def test_the_model_of_a_checkpoint_is_the_anchor(group, tmp_path):
    settings = RULE | {"zero": 2}
    found = group(4, islands=2)(part_case, tmp_path, 0, 4, settings, (3, 4))
    read, model = load_file(tmp_path / "step-4/model.safetensors"), mlp()
    model.load_state_dict(read)
    assert torch.equal(flat(model), found[0][2])
    sets = [
        json.loads((tmp_path / f"step-{n}/checkpoint.json").read_text())["sets"] for n in (3, 4)
    ]
    at_once = {"model", "optimizer", "island-1-optimizer", "outer"}
    assert set(sets[0]) == at_once  # the weights are the anchor, so they are stored once
    assert set(sets[1]) == at_once | {"island-0", "island-1"}


def test_other_number_of_islands_loads_the_mean(group, tmp_path):
    settings = RULE | {"zero": 1, "wire": "int8"}
    found = group(4, islands=2)(part_case, tmp_path, 0, 4, settings, (4,))
    mean = (found[0][1] + found[3][1]) / 2
    for _, mine, anchor in group(4, islands=4)(part_case, tmp_path, 4, 4, settings):
        assert torch.allclose(mine, mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(anchor, found[0][2])
    (_, mine, _), _ = group(2)(part_case, tmp_path, 4, 4, {"zero": 3})
    assert torch.allclose(mine, mean, rtol=1e-12, atol=1e-12)
    read = load_file(tmp_path / "step-4/optimizer.safetensors")
    theirs = load_file(tmp_path / "step-4/island-1-optimizer.safetensors")
    moments = group(2)(moments_case, tmp_path)[0]
    for name, value in moments.items():
        assert torch.allclose(value, (read[name] + theirs[name]) / 2, rtol=1e-12, atol=1e-15)


def moments_case(world, folder):
    model = mlp()
    engine = sw.Engine(model, optimizer_of("adamw", model), zero=2)
    engine.resume(folder)
    state = engine.optimizer_state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    engine.close()
    return {
        f"{names[number]}.{key}": value
        for number, entries in state.items()
        for key, value in entries.items()
        if value.ndim
    }


def test_islands_load_a_checkpoint_without_islands(group, tmp_path):
    _, mine, _ = group(2)(part_case, tmp_path, 0, 2, {}, (2,))[0]
    for _, theirs, anchor in group(4, islands=2)(part_case, tmp_path, 2, 2, RULE):
        assert torch.equal(theirs, mine)
        assert torch.equal(anchor, mine)
    losses = [each[0] for each in group(4, islands=2)(part_case, tmp_path, 2, 5, RULE)]
    assert losses[0] != losses[3]


def asked_case(world, folder, settings):
    """Ask one rank to end between two boundaries."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("adamw", model), **settings)
    engine.resume(folder)
    try:
        for step, batch in enumerate(batches(9)):
            if world.rank == 3 and step == 3:
                world.preemption.asked = signal.SIGUSR1
            engine.backward(loss_of(model, world.share(batch)))
            engine.step()
    except SystemExit as error:
        return error.code, engine.steps
    finally:
        world.preemption.asked = world.preemption.agreed = 0
        world.preemption.forget()
        world.preemption._savers.clear()
        engine.close()


@pytest.mark.parametrize(("late", "ends"), [(0, 6), (1, 7)])
def test_all_islands_end_at_the_next_boundary(group, tmp_path, late, ends):
    found = group(4, islands=2)(asked_case, tmp_path, RULE | {"late": late})
    assert found == [(75, ends)] * 4
    assert (tmp_path / f"step-{ends}").is_dir()
