"""The bytes of the states that a plan computes are those that the engine lays out, to the byte."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.placement import Placement
from shardwise.planning.engine_parts import note_spec, recorded
from shardwise.planning.layout import lay_out
from shardwise.planning.record import StepRecord


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


def planned_and_laid(world, kind, level, precision, bucket_mb):
    """By rank, what the plan and what the engine says of each state."""
    torch.manual_seed(0)
    model = Model()
    given = optimizers(kind, model)
    engine = sw.Engine(model, given, zero=level, precision=precision, bucket_mb=bucket_mb)
    laid = engine._states.bytes_by_state()
    notes = note_spec(engine._spec, 0)
    record = StepRecord(
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
    )
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
