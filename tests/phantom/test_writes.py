"""Writes into sharded parameters that would be lost, at rest or in a forward."""

from contextlib import contextmanager

import pytest
import torch

import shardwise as sw
from shardwise.errors import BrokenView
from shardwise.states.parameters import lost_writes
from tests.distributed.test_sharded_touch import ERRORS, WRITES
from tests.phantom import cases


def started(world, kind):
    model, optimizer = cases.made(world, kind)
    return model, sw.Engine(model, optimizer, zero=3)


def trained(world, model, engine, step):
    engine.backward(cases.loss_of(model, *world.share(cases.batch(world, step))))
    engine.step()


TRIED = {
    name: write
    for name, write in WRITES.items()
    # The simulated device has no set_; a device's memory is no array, sharded or not.
    if name not in ("set_", "numpy")
}


def at_rest(world):
    """Return the names of writes that were refused, at once or by the engine's next call."""
    refused, engine = set(), None
    for name, write in TRIED.items():
        if engine is None:
            model, engine = started(world, cases.Model)
            trained(world, model, engine, 0)
        try:
            with torch.no_grad():
                write(model.blocks[1].up.weight)
        except ERRORS:
            refused.add(name)
            continue
        try:
            trained(world, model, engine, 1)
        except ERRORS:
            refused.add(name)
        engine.close()
        engine = None
    return refused


def test_writes_at_rest_are_refused_on_a_device(phantom):
    for refused in phantom(2, at_rest):
        assert refused == set(TRIED)


class Halving(cases.Model):
    """A model whose forward writes into a parameter from some step on."""

    writes = False

    def forward(self, x):
        if self.writes:
            self.head.weight.data.mul_(0.5)
        return super().forward(x)


@contextmanager
def often_compared():
    """Compare the sharded parameters of more gathers than usual, so that fewer steps show all."""
    before = lost_writes.FIRST, lost_writes.INTERVAL
    lost_writes.FIRST, lost_writes.INTERVAL = 3, 7
    try:
        yield
    finally:
        lost_writes.FIRST, lost_writes.INTERVAL = before


@often_compared()
def begun_late(world):
    """Return the step that finds a write, and the waits before it."""
    from tests.phantom.streams import Device

    model, engine = started(world, Halving)
    for step in range(lost_writes.FIRST):
        trained(world, model, engine, step)
    model.writes = True
    Device.order.begin()
    for step in range(lost_writes.INTERVAL + 2):
        try:
            trained(world, model, engine, step)
        except BrokenView as error:
            return step, str(error), dict(Device.order.synchronisations)
    return None


class Late:
    """An event that happens only when the host waits for it."""

    def __init__(self, event):
        self.synchronize = event.synchronize

    def query(self):
        return False


@often_compared()
def written_last(world, how):
    """Return the error of `how` about writes whose comparison is not on the host yet."""
    plain = lost_writes.start_to_host

    def start_late(tensor):
        memory, event = plain(tensor)
        return memory, Late(event)

    lost_writes.start_to_host = start_late
    model, engine = started(world, Halving)
    coming = engine._states.shown.residency._whole._writes._pending
    for step in range(lost_writes.INTERVAL + 2):
        model.writes = step >= lost_writes.FIRST
        trained(world, model, engine, step)
    assert coming
    said = ""
    try:
        getattr(engine, how)()
    except BrokenView as error:
        said = str(error)
    lost_writes.start_to_host = plain
    if how != "close":
        engine.close()
    return said


@pytest.mark.parametrize(
    "how",
    [
        "close",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("model_state_dict", "optimizer_state_dict")
        ),
    ],
)
def test_reports_write_in_the_last_forward_before_states_are_read(phantom, how):
    for said in phantom(2, written_last, how):
        assert "head.weight was written while sharded" in said


def test_finds_late_write_in_forward_without_waiting(phantom):
    for step, said, waits in phantom(2, begun_late):
        assert "head.weight was written while sharded" in said
        assert step > 0
        assert not [cause for cause in waits if "lost_writes" in cause or "copy_stream" in cause]
