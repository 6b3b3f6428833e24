"""Saving, comparing and restoring the states of the global CPU generators."""

import random

import numpy as np
import pytest
import torch

from shardwise.world.cpu_generators import CpuGenerators, preserved, seed_cpu

DRAWS = {
    "torch": lambda: torch.rand(()),
    "torch normal": lambda: torch.randn(()),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "nothing": lambda: None,
}


@pytest.fixture(autouse=True)
def _own_generators():
    with preserved():
        yield


def _public_states():
    return repr(
        (
            torch.get_rng_state().tolist(),
            random.getstate(),
            [str(value) for value in np.random.get_state()],
        )
    )


@pytest.mark.parametrize("kept", ["", "numpy normal", "gauss"])
@pytest.mark.parametrize("draw", DRAWS)
def test_each_draw_is_detected_and_undone(draw, kept):
    seed_cpu(3)
    if kept:  # of two normal numbers that were drawn, the second one is kept
        DRAWS[kept]()
    before, public = CpuGenerators.now(), _public_states()
    assert _public_states() == public  # `now` has changed nothing
    assert before == CpuGenerators.now()
    assert not before.has_changed()
    DRAWS[draw]()
    is_draw = draw != "nothing"
    assert before.has_changed() == (before != CpuGenerators.now()) == is_draw
    for _ in range(3):
        for other in DRAWS.values():
            other()
    before.restore()
    assert _public_states() == public


def test_another_bit_generator_of_numpy_is_saved_and_restored():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = CpuGenerators.now()
        drawn = np.random.rand()
        assert before.has_changed()
        before.restore()
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(own)
