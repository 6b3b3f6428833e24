"""The bytes of states in a plan equal the engine's."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.layout.bucket_layout import ALIGNMENT
from shardwise.layout.placement import Placement
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.engine_parts import note_experts, note_spec, recorded
from shardwise.tools.plan.layout import lay_out
from shardwise.tools.plan.memory import Hardware, predict
from shardwise.tools.plan.plans import rounding_bytes, saved_bytes
from shardwise.tools.plan.record import StepRecord
from shardwise.tools.plan.search import Line
from tests.tables import each_value


class Model(nn.Module):
    """Two equal units, parameters outside of units, and a frozen parameter."""

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
    """Return the record of an engine without any operations."""
    notes = note_spec(engine._spec, 0)
    note_experts(engine._spec, notes.parameters)
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


def planned_and_laid(world, kind, level, precision, bucket_mb, state="full"):
    """Return, for each rank, the plan's and the engine's bytes of each state."""
    torch.manual_seed(0)
    model = Model()
    settings = {"precision": precision, "bucket_mb": bucket_mb}
    if state == "nf4":
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        linear[0].weight.requires_grad_(False)
        settings["frozen_weights"] = state
    else:
        settings["optimizer_state"] = state
    given = optimizers(kind, model)
    engine = sw.Engine(model, given, zero=level, **settings)
    laid = engine._states.bytes_by_state()
    record = record_of(engine, precision)
    layout = lay_out(record, Placement.zero(level), world.size, bucket_mb=bucket_mb)
    planned = layout.bytes_by_state(world.rank)
    engine.close()
    return planned, laid


@each_value(size=[1, 2, 3, 4], level=[0, 1, 2, 3])
def test_planned_states_equal_the_engines(group, size, level):
    cases = [("groups", "fp32", 0.004), ("sgd", "bf16", 25.0), ("whole", "fp32", 0.01)]
    cases += [("groups", "bf16", 0.004, each) for each in ("8bit", "8bit-bf16", "nf4")]
    for kind, precision, *options in cases:
        for planned, laid in group(size)(planned_and_laid, kind, level, precision, *options):
            assert planned == laid, (kind, precision, options)
            assert all(laid[state] for state in ("parameters", "gradients"))


def planned_and_laid_experts(world, level):
    """Return the plan's and the engine's bytes on a rank, and whether it holds the most experts."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 16)) for _ in range(5))
    layer = sw.MoE(nn.Linear(16, 5, bias=False), experts, shared=nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(7, 16), layer, nn.Linear(16, 3))
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), zero=level, bucket_mb=0.002)
    laid, is_last = engine._states.bytes_by_state(), world.expert.rank == world.expert.size - 1
    engine.close()
    record = record_of(engine)  # of the whole model
    row, parts = Placement.zero(level), world.expert.size
    layout = lay_out(record, row, world.size, bucket_mb=0.002, expert=parts)
    return layout.bytes_by_state(world.rank), laid, is_last


@pytest.mark.parametrize(
    "level", [1, 3, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2))]
)
def test_planned_states_equal_those_of_the_rank_with_the_most_experts(group, level):
    found = group(4, expert=2)(planned_and_laid_experts, level)
    assert [is_last for *_, is_last in found] == [False, True, False, True]
    for planned, laid, is_last in found:
        if is_last:
            assert planned == laid
        else:
            assert planned["parameters"] > laid["parameters"]


def bound_and_copy(world, level, folder):
    """Return the bound of a background save, the bytes it copied, and the rounding in the bound.

    Parameters are multiples of 16 elements, so nothing is padded.
    """
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


@each_value(size=[1, 2, 3], level=[0, 1, 2, 3])
def test_background_save_copies_at_most_the_planned_bytes(group, size, level, tmp_path):
    found = group(size)(bound_and_copy, level, tmp_path)
    assert all(copied <= bound for bound, copied, _ in found), found
    bound, copied, rounding = found[0]  # rank 0 writes the buffers too
    # Shards of the frozen bucket are multiples of this many floats.
    assert bound - copied <= (rounding + 4 * ALIGNMENT if size > 1 else 0), found
