"""With `--survive`, second copies of replicated parameters include the script's own changes.

The only rank holds the copy of its own state here, so one process is enough.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.layout.placement import Placement
from shardwise.states.second_copies import SecondCopies
from shardwise.tools.plan.layout import lay_out
from shardwise.tools.plan.record import GroupRecord, ParameterRecord
from shardwise.world.world import World


def with_copies(zero: int) -> tuple[nn.Linear, sw.Engine]:
    """Return a model, and an engine that holds a second copy of its own state."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True, zero=zero)
    states, objects = engine._states, engine._state.objects
    copies = SecondCopies(
        states.parameters,
        states.optimizer.groups,
        states.gradients.buckets,
        states.storage_factories["optimizer"],
        {},
        objects.spec.shard_groups,
    )
    objects.states = dataclasses.replace(states, copies=copies)
    return model, engine


@pytest.mark.parametrize("zero", [1, 2])
def test_a_write_to_full_parameters_reaches_the_copy(solo: World, zero: int) -> None:
    model, engine = with_copies(zero)
    with engine.full_parameters(write=True):
        model.bias.add_(0.25)
    states = engine._states
    assert states.copies is not None
    copies = states.copies.optimizer.intervals
    for own, copy in zip(states.optimizer.intervals, copies, strict=True):
        assert torch.equal(own.target.loaded(), copy.target.loaded())


def test_plan_knows_the_bytes_of_the_copies(solo: World) -> None:
    """The plan is for two ranks with intervals of the size that the only rank has here."""
    _, engine = with_copies(2)
    assert engine._states.copies is not None
    numel = sum(bucket.numel for bucket in engine._states.parameters.buckets)
    group = GroupRecord("SGD", 0, 0, (), True, True, True, True)
    parameters = (ParameterRecord("0", (2 * numel,), "float64", 8, 0, 0, 0),)
    record = SimpleNamespace(
        parameters=parameters, groups=(group,), units=("0",), precision="fp64", buffer_bytes=0
    )
    layout = lay_out(record, Placement.zero(2), 2)  # type: ignore[arg-type]
    assert layout.second_copies(0)[0] == engine._states.copies.state_bytes


@pytest.mark.parametrize("zero", [1, 2])
def test_a_direct_write_before_a_loss_is_kept(solo: World, zero: int) -> None:
    """The new layout takes the lost ranks' values from the copies."""
    model, engine = with_copies(zero)
    with torch.no_grad():
        model.bias.add_(0.25)
    expected = model.bias.detach().clone()
    objects = engine._state.objects
    objects.lay_out(objects.gather_from_left())
    assert torch.equal(model.bias, expected)
