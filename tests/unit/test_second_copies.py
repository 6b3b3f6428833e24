"""With `--survive`, second copies of replicated parameters include the script's own changes.

The only rank holds the copy of its own state here, so one process is enough.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.states.second_copies import SecondCopies
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
        objects.spec.shard_group,
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
