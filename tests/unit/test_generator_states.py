"""Saving, comparing and restoring the states of the global generators."""

import json
import random
import struct

import numpy as np
import pytest
import torch

from shardwise.errors import UsageError
from shardwise.world.generator_states import GeneratorStates, preserved
from shardwise.world.randomness import seed_cpu

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
    before, public = GeneratorStates.now(), _public_states()
    assert _public_states() == public  # `now` has changed nothing
    assert before == GeneratorStates.now()
    assert not before.has_changed()
    DRAWS[draw]()
    is_draw = draw != "nothing"
    assert before.has_changed() == (before != GeneratorStates.now()) == is_draw
    for _ in range(3):
        for other in DRAWS.values():
            other()
    before.restore()
    assert _public_states() == public


@pytest.mark.parametrize("kept", ["", "numpy normal", "gauss"])
def test_states_survive_conversion_to_json(kept):
    seed_cpu(3)
    if kept:
        DRAWS[kept]()
    states = GeneratorStates.now()
    again = GeneratorStates.of_plain(json.loads(json.dumps(states.plain())))
    assert again == states
    assert again.digest() == states.digest()
    drawn = [float(draw()) for draw in DRAWS.values() if draw() is not None]
    again.restore()
    assert [float(draw()) for draw in DRAWS.values() if draw() is not None] == drawn


@pytest.mark.parametrize("part", ["python", "numpy"])
def test_rejects_states_of_the_wrong_length(part):
    plain = GeneratorStates.now().plain()
    plain[part][1] = plain[part][1][:-2]
    with pytest.raises((ValueError, struct.error)):
        GeneratorStates.of_plain(plain)


@pytest.mark.parametrize("kept", ["", "numpy normal", "gauss"])
def test_seeded_returns_the_current_states(kept):
    if kept:
        DRAWS[kept]()
    assert GeneratorStates.seeded(5) == GeneratorStates.now()


def test_another_bit_generator_of_numpy_is_saved_and_restored():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = GeneratorStates.now()
        drawn = np.random.rand()
        assert before.has_changed()
        before.restore()
        assert np.random.rand() == drawn
        with pytest.raises(UsageError, match=r"is PCG64.*Leave numpy.random.set_bit_generator out"):
            before.plain()
    finally:
        np.random.set_bit_generator(own)
