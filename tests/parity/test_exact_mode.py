"""Promise 5: the exact mode gives identical bits for every number of workers and every ZeRO stage.

The test hashes losses, norms, parameters, buffers and optimizer state over two epochs, whose last
batch leaves micro-shards of different lengths. The hash is compared with that of a single worker.
"""

import os
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from shardwise.states.storage import storage
from shardwise.states.storage.squared_sums import GRAIN
from tests.disk import on_a_disk
from tests.parity import exact_problems
from tests.parity.pairwise import pairwise
from tests.tables import covering

FACTORS: dict[str, tuple[Any, ...]] = {
    "workers": (4, 2, 1),
    "zero": (0, 1, 2, 3),
    "model": ("gpt", "convnet", "lstm"),
    "transport": ("auto", "gloo"),
    "activations": ("kept", "recomputed"),
    "rests": ("device", "optimizer", "gradients", "everything"),
    "bucket_mb": (0.002, 0.01, 25.0),
    "overlap": (True, False),
}
FIRST_ROW = {"device": 0, "optimizer": 0, "gradients": 2, "everything": 3}
"""The first row that allows each state on a disk."""

STATES = {
    "device": (),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "everything": ("optimizer", "params"),
}


def _allowed(case):
    return case.get("zero", 3) >= FIRST_ROW[case.get("rests", "device")]


def _name(case):
    return "-".join(f"{key}={value}" for key, value in case.items())


def trained(world, exact, model, settings, **further) -> str:
    """Return the hash of `model` trained with `exact` micro-shards (None: not exact)."""
    storage.SPAN = 2 * GRAIN  # several spans, also in models as small as these
    if exact is not None:
        os.environ["SHARDWISE_EXACT"] = str(exact)
        world.settings = world.settle()
    return exact_problems.train(world, model, settings, **further)


@pytest.fixture(scope="module")
def alone(group):
    """Return a function for the hash of one worker with replicated states; each is trained once."""
    known: dict[Any, str] = {}

    def ask(model, exact=4, settings=(), **further):
        key = model, exact, str(settings), tuple(further.items())
        if key not in known:
            (known[key],) = group(1)(_alone, exact, model, dict(settings), further)
        return known[key]

    return ask


def _alone(world, exact, model, settings, further):
    return trained(world, exact, model, settings, **further)


def _pairs() -> list[ParameterSet]:
    """Return the cases of every two values. `make test` runs each value twice."""
    cases = pairwise(FACTORS, _allowed)
    rows = covering((tuple(case.values()) for case in cases), often=2)
    return [
        pytest.param(case, marks=row.marks, id=_name(case))
        for case, row in zip(cases, rows, strict=True)
    ]


@pytest.mark.parametrize("case", _pairs())
def test_same_bits_as_one_worker(group, alone, case):
    settings = {key: case[key] for key in ("zero", "activations", "bucket_mb", "overlap")}
    settings |= {f"offload_{state}": f"nvme:{on_a_disk()}" for state in STATES[case["rests"]]}
    ranks = group(case["workers"], transport=case["transport"])
    assert set(ranks(trained, 4, case["model"], settings)) == {alone(case["model"])}


@pytest.mark.parametrize("model", exact_problems.MODELS)
def test_without_it_bits_differ(group, alone, model):
    """Otherwise the tests above would prove nothing."""
    first, second = group(2)(trained, None, model, {"sync_batch_norm": True})
    assert first == second
    assert first != alone(model)


@pytest.mark.parametrize("optimizer", ["rmsprop", "sgd"])
def test_loops_over_vectors_have_no_rest(group, alone, optimizer):
    """torch's vectorised loops round their last few elements differently, and these optimizers
    consist of several such loops."""
    found = group(2)(_alone, 4, "gpt", {"zero": 3}, {"optimizer": optimizer})
    assert set(found) == {alone("gpt", optimizer=optimizer)}


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "reduce_dtype": "param"},
        {"precision": "bf16-mixed", "ema_decay": 0.9},
    ],
    ids=_name,
)
def test_narrow_numbers(group, alone, settings):
    found = group(4)(trained, 4, "gpt", settings | {"zero": 2})
    assert set(found) == {alone("gpt", settings=settings.items())}
    on_disk = {"zero": 2, "offload_gradients": f"nvme:{on_a_disk()}"}
    assert set(group(2)(trained, 4, "gpt", settings | on_disk)) == set(found)


def test_gradients_whose_squares_overflow(group, alone):
    found = group(4)(_alone, 4, "gpt", {"zero": 1}, {"scale": 1e22})
    assert set(found) == {alone("gpt", scale=1e22)}


def test_more_micro_shards_than_samples_in_the_last_batch(group, alone):
    """In the last batch of 6, two of 8 micro-shards are stand-ins."""
    for workers, zero in ((2, 0), (4, 3)):
        assert set(group(workers)(trained, 8, "convnet", {"zero": zero})) == {alone("convnet", 8)}


def resumed(world, model, settings, folder, steps):
    """Return the hash of `model` when the training in `folder` continues until step `steps`."""
    storage.SPAN = 2 * GRAIN
    os.environ["SHARDWISE_EXACT"] = "4"
    world.settings = world.settle()
    return exact_problems.train_on(world, model, settings, folder, steps)


@pytest.mark.parametrize("model", exact_problems.MODELS)
def test_same_bits_after_resumes_at_other_sizes(group, model, tmp_path):
    """Train 8 steps in two epochs, with saves within and at the end of an epoch, at other sizes."""
    (alone,) = group(1)(resumed, model, {}, str(tmp_path / "alone"), 8)
    folder = str(tmp_path / "moved")
    for workers, steps, zero in ((4, 3, 3), (1, 4, 0), (2, 8, 2)):
        found = group(workers)(resumed, model, {"zero": zero}, folder, steps)
    assert set(found) == {alone}
