"""Bytes per rank equal the table of the ZeRO paper (Rajbhandari et al., 2020) plus padding."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.layout.bucket_layout import padding
from shardwise.states.gradients.reduction_queue import IN_FLIGHT

FORMULAS = {
    ("fp32", 0): (16, 0),
    ("fp32", 1): (8, 8),
    ("fp32", 2): (4, 12),
    ("fp32", 3): (0, 16),
    ("bf16", 0): (16, 0),
    ("bf16", 1): (4, 12),
    ("bf16", 2): (2, 14),
    ("bf16", 3): (0, 16),
}
"""(a, b): a rank of N holds a P + b P / N bytes for P parameters under Adam."""

MOMENTS = 8
"""Bytes of Adam's two moments per element. Only this state has no padding."""

SMALL_THINGS = 2048
"""Bytes allowed besides the states and the buffers in flight: step counts and similar."""

BUCKET_MB = 0.02


def _model():
    return nn.Sequential(nn.Linear(50, 90), nn.GELU(), nn.Linear(90, 90), nn.Linear(90, 3))


def _held(world, zero, precision):
    """Return bytes after a step: by the engine, in tensors, and by the layout."""
    _trained(world, zero, precision)  # the transport keeps its scratch memory between engines
    others = _storages()
    engine = _trained(world, zero, precision)
    return {
        "bytes": engine.state_bytes,
        "living": sum(s.nbytes() for place, s in _storages().items() if place not in others),
        "buckets": engine._states.parameters.buckets,
        "own": [part.own for part in engine._states.optimizer.intervals],
        "in_flight": _in_flight(engine),
    }


def _trained(world, zero, precision):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = sw.Engine(model, optimizer, zero=zero, precision=precision, bucket_mb=BUCKET_MB)
    x, y = world.share((torch.randn(8, 50), torch.arange(8) % 3))
    engine.backward(F.cross_entropy(model(x), y))
    engine.step()
    return engine


def _in_flight(engine):
    """Return bytes of buffers besides the states: pending gradients, a gathered unit."""
    parameters = engine._states.parameters
    buckets = [
        bucket.numel * parameters.kind(index)[0].itemsize
        for index, bucket in enumerate(parameters.buckets)
    ]
    sharded = engine.placement.is_sharded
    return sharded("gradients") * IN_FLIGHT * max(buckets) + sharded("parameters") * sum(buckets)


def _storages():
    """Return every storage that a Python tensor holds now, by its address.

    The storages are kept alive, so that no new storage gets the address of a freed one.
    """
    gc.collect()
    living = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in living if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in storages}


def _tail(held):
    """Return, by bucket, the elements before the first and after the last parameter of a rank."""
    tail = 0
    for bucket, (first, end) in zip(held["buckets"], held["own"], strict=True):
        pieces = bucket.pieces(first, end)
        tail += end - first - (pieces[-1].end - pieces[0].start if pieces else 0)
    return tail


@pytest.mark.parametrize(
    "size", [2, 3, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))]
)
@pytest.mark.parametrize(("precision", "zero"), FORMULAS)
def test_state_bytes_are_the_formula_plus_padding(group, size, precision, zero):
    whole, shared = FORMULAS[precision, zero]
    parameters = sum(parameter.numel() for parameter in _model().parameters())
    ranks = group(size)(_held, zero, precision)
    for held in ranks:
        padded = parameters + padding(held["buckets"])
        assert padded < 1.05 * parameters
        assert held["bytes"] == whole * padded + shared * padded / size - MOMENTS * _tail(held)
        assert 0 <= held["living"] - held["bytes"] <= held["in_flight"] + SMALL_THINGS
    assert sum(held["bytes"] for held in ranks) >= (size * whole + shared) * parameters


@pytest.mark.parametrize("size", [2, 3, 4])
def test_intervals_are_equal_after_padding(group, size):
    for bucket in group(size)(_held, 2, "fp32")[0]["buckets"]:
        lengths = {bucket.interval(rank)[1] - bucket.interval(rank)[0] for rank in range(size)}
        assert len(lengths) == 1
        assert bucket.numel == size * lengths.pop()
