"""The bytes of the states that a plan computes are those that the engine lays out, to the byte."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.layout.bucket_layout import ALIGNMENT
from shardwise.layout.placement import Placement
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.engine_parts import note_spec, recorded
from shardwise.tools.plan.layout import lay_out
from shardwise.tools.plan.memory import Hardware, predict
from shardwise.tools.plan.plans import rounding_bytes, saved_bytes
from shardwise.tools.plan.record import StepRecord
from shardwise.tools.plan.search import Line


class Model(nn.Module):
    """Two equal units, a rest around them, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(7, 33)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 33)) for _ in range(3)
        )
        self.head = nn.Linear(33, 3)
        self.head.bias.requires_grad_(False)


def optimizers(kind, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2]
    others = [p for p in trained if p.ndim < 2]
    if kind == "groups":
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1)
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.Adam(others, lr=1e-3)]


def record_of(engine, precision="fp32"):
    """The record of an engine before any operation was observed."""
    notes = note_spec(engine._spec, 0)
    buffers = [each for model in engine._spec.models for each in model.buffers()]
    return StepRecord(
        operations=(),
        tensors=(),
        parameters=tuple(map(recorded, notes.parameters)),
        groups=tuple(notes.groups),
        units=tuple(notes.units),
        uses=(),
        batch_size=1,
        total_batch=1,
        backward=0,
        precision=precision,
        activations="kept",
        buffer_bytes=sum(each.nbytes for each in buffers),
    )


def planned_and_laid(world, kind, level, precision, bucket_mb):
    """By rank, what the plan and what the engine says of each state."""
    torch.manual_seed(0)
    model = Model()
    given = optimizers(kind, model)
    engine = sw.Engine(model, given, zero=level, precision=precision, bucket_mb=bucket_mb)
    laid = engine._states.bytes_by_state()
    record = record_of(engine, precision)
    layout = lay_out(record, Placement.zero(level), world.size, bucket_mb=bucket_mb)
    planned = layout.bytes_by_state(world.rank)
    engine.close()
    return planned, laid


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_states_are_those_of_the_engine(group, size, level):
    cases = [("groups", "fp32", 0.004), ("sgd", "bf16", 25.0), ("whole", "fp32", 0.01)]
    for kind, precision, bucket_mb in cases:
        for planned, laid in group(size)(planned_and_laid, kind, level, precision, bucket_mb):
            assert planned == laid, (kind, precision)
            assert all(laid[state] for state in ("parameters", "gradients"))


def bound_and_copy(world, level, folder):
    """The bound of a background save, the bytes of the copy that one has made, and what the bound
    adds for uneven cuts. Parameters are whole multiples of 16 elements: nothing is padded."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 96), nn.BatchNorm1d(96), nn.Linear(96, 96), nn.Linear(96, 48)
    )
    model[2].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.AdamW(trained), zero=level, bucket_mb=1e-4)
    record = record_of(engine)
    engine.backward(model(torch.randn(4, 16)).square().mean())
    engine.step()
    engine.save(folder, background=True)
    copied = sum(each.nbytes for each in engine._checkpoints.saver._copies._memory)
    engine.close()
    row = Placement.zero(level)
    choice = Choice(row=row, data=world.size, micro_batch=1, bucket_mb=1e-4)
    memory = predict(record, choice, Hardware(apart=False, shares=True), rank=world.rank)
    return saved_bytes(Line(choice, memory, None, 0), record), copied, rounding_bytes(record)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_background_save_copies_no_more_than_is_planned(group, size, level, tmp_path):
    found = group(size)(bound_and_copy, level, tmp_path)
    assert all(copied <= bound for bound, copied, _ in found), found
    bound, copied, rounding = found[0]  # rank 0 writes the buffers too
    # The cut of the frozen bucket falls on a whole multiple of so many floats.
    assert bound - copied <= (rounding + 4 * ALIGNMENT if size > 1 else 0), found
