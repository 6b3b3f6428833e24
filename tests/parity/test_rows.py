"""Promise 1: every row, on any number of workers, trains as one plain PyTorch process does.

In fp64 losses, gradient norms and every tensor agree to 1e-8 over 20 steps; in fp32 losses and
norms to 1e-5. Every two values of the factors below meet in some case. `make test` runs 20 steps of
as many cases as contain every value, and 6 of the others. `-m full` runs 20 of all, and the whole
product of the factors that the promise names.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

import shardwise as sw
from shardwise.layout.bucket_layout import even_cuts
from shardwise.states.storage import storage
from tests.disk import on_a_disk
from tests.parity.pairwise import pairwise
from tests.parity.plain import Trained
from tests.parity.problems import BATCH, MICRO_ROWS, Problem, loss_of, weight_of
from tests.tables import covering

PROMISED = {
    "workers": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "optimizer": ("sgd", "adamw", "adagrad"),
    "model": ("mlp", "convnet", "gpt"),
    "micro": ("1", "3", "short"),
    "dtype": (torch.float64, torch.float32),
}
FURTHER = {
    "bucket_mb": (0.002, 0.0005, 25.0),
    "overlap": (True, False),
    "clip": (None, 0.3),
    "schedule": ("cosine", "constant"),
    "groups": (2, 1),
    "feed": ("loader", "hand"),
    "rests": ("device", "optimizer", "gradients", "everything"),
    "activations": ("kept", "recomputed"),
    "hosts": (1, 2),
}
LEGAL = {"device": 0, "optimizer": 0, "gradients": 2, "everything": 3}
"""The first row that allows each state on a disk."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


def _allowed(case):
    """Return whether a case is valid: only the Loader tells BatchNorm which rows are stand-ins, not
    every tier is legal in every row, and two hosts need two workers each."""
    if case.get("hosts") == 2 and case.get("workers", 4) != 4:
        return False
    stand_ins = case.get("model") == "convnet" and case.get("micro", "1") != "1"
    if stand_ins and case.get("feed") == "hand":
        return False
    return case.get("zero", 3) >= LEGAL[case.get("rests", "device")]


def _whole_product() -> Iterator[dict[str, Any]]:
    """Return the product of the promised factors; the other factors are drawn with a fixed seed."""
    for number, values in enumerate(product(*PROMISED.values())):
        draw = random.Random(number)
        case = dict(zip(PROMISED, values, strict=True))
        further = {name: draw.choice(choices) for name, choices in FURTHER.items()}
        while not _allowed(case | further):
            further = {name: draw.choice(choices) for name, choices in FURTHER.items()}
        yield case | further


def _name(case):
    return "-".join(
        f"{key}={value}" if isinstance(value, int | float | None) else str(value).split(".")[-1]
        for key, value in case.items()
    )


def _pairs() -> Iterator[ParameterSet]:
    cases = pairwise(PROMISED | FURTHER, _allowed)
    rows = covering(tuple(case.values()) for case in cases)
    for case, long in zip(cases, rows, strict=True):
        yield pytest.param(case, False, marks=long.marks, id=f"{_name(case)}-long")
        if long.marks:
            yield pytest.param(case, True, id=f"{_name(case)}-brief")


@pytest.mark.parametrize(("case", "brief"), list(_pairs()))
def test_trains_as_one_plain_process(group, plain, case, brief):
    _compare(group, plain, case, brief)


@pytest.mark.full
@pytest.mark.parametrize("case", list(_whole_product()), ids=_name)
def test_the_whole_product_trains_as_one_plain_process(group, plain, case):
    _compare(group, plain, case, brief=False)


# -- on every rank ----------------------------------------------------------------------------


def _tiers(case) -> dict[str, Any]:
    folder = on_a_disk()
    states = {
        "device": (),
        "optimizer": ("optimizer",),
        "gradients": ("gradients",),
        "everything": ("optimizer", "params"),
    }
    return {f"offload_{state}": f"nvme:{folder}" for state in states[case["rests"]]}


def _train(world, case, problem) -> tuple[str, Trained]:
    """Train with our engine. Return the rank's own view of the model, and the full model."""
    storage.SPAN = 96  # several spans, also in models as small as these
    model, optimizer, scheduler = problem.model_and_optimizer(seed=world.rank)
    engine = sw.Engine(
        model,
        optimizer,
        zero=case["zero"],
        bucket_mb=case["bucket_mb"],
        overlap=case["overlap"],
        sync_batch_norm=True,
        activations=case["activations"],
        **_tiers(case),
    )
    losses, norms = [], []
    feed = {"loader": _from_loader, "hand": _by_hand}[case["feed"]]
    for window in feed(world, case, problem):
        for (x, y), told in window:
            engine.backward(loss_of(model, x, y), **told)
        stats = engine.step(max_norm=problem.clip)
        scheduler.step()
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    with engine.full_parameters():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    whole = Trained(
        losses=losses, norms=norms, model=state, optimizer=engine.optimizer_state_dict()
    )
    engine.close()
    return _digest(state), whole


def _from_loader(world, case, problem) -> Iterator[Any]:
    """Yield the batches of each window and the arguments of `backward`: a weight for tokens."""
    x, y = problem.data()
    data = torch.utils.data.TensorDataset(x, y)
    rows = None if problem.micro == "1" else MICRO_ROWS[world.size]
    loader = sw.Loader(data, batch_size=BATCH, micro_batch_size=rows)
    told = (lambda y: {"weight": weight_of(y)}) if problem.model.endswith("gpt") else (lambda y: {})
    for _ in loader.epochs(problem.epochs):
        for step in loader.steps():
            yield (((x, y), told(y)) for x, y in step)


def _by_hand(world, case, problem) -> Iterator[Any]:
    """Yield the same windows, sliced by the script; a rank without rows runs one with weight 0."""
    x, y = problem.data()
    for first, end in problem.windows():
        cuts = even_cuts(end - first, world.size)
        most = -(-(end - first) // world.size)
        width = most if problem.micro == "1" else MICRO_ROWS[world.size]
        mine = range(first + cuts[world.rank], first + cuts[world.rank + 1])
        yield [
            _slice(x, y, mine[start : start + width], last=start + width >= most)
            for start in range(0, most, width)
        ]


def _slice(x, y, rows, *, last):
    taken = list(rows) or [0]
    weight = weight_of(y[taken]) if rows else 0
    return (x[taken], y[taken]), {"weight": weight, "last": last}


def _digest(state):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


# -- the comparison ---------------------------------------------------------------------------


def _compare(group, plain, case, brief):
    problem = _problem(case, brief)
    wanted = plain(problem)
    apart = {"hosts": [0, 0, 1, 1]} if case["hosts"] == 2 else {}
    results = group(case["workers"], **apart)(_train, case, problem, limit=120)
    assert len({digest for digest, _ in results}) == 1, "ranks end with different models"
    ours, tolerance = results[0][1], TOLERANCE[case["dtype"]]
    _assert_close("losses", torch.tensor(ours.losses), torch.tensor(wanted.losses), tolerance)
    _assert_close("norms", torch.tensor(ours.norms), torch.tensor(wanted.norms), tolerance)
    assert case["clip"] is None or max(wanted.norms) > case["clip"], "clipping was never on"
    exact = case["dtype"] == torch.float64
    _assert_same("model", ours.model, wanted.model, tolerance if exact else None)
    _assert_same("optimizer", ours.optimizer, wanted.optimizer, tolerance if exact else None)


def _problem(case, brief):
    names = ("model", "optimizer", "micro", "dtype", "clip", "schedule", "groups")
    looks_across_rows = case["model"] == "convnet" and case["micro"] != "1"
    return Problem(
        **{name: case[name] for name in names},
        workers=case["workers"] if looks_across_rows else 1,
        brief=brief,
    )


def _assert_same(name, ours, plain, tolerance):
    """Compare nested states: numbers exactly, tensors within `tolerance` (None: only shapes)."""
    if isinstance(plain, dict):
        assert ours.keys() == plain.keys(), name
        for key in plain:
            _assert_same(f"{name}[{key}]", ours[key], plain[key], tolerance)
    elif isinstance(plain, list):
        assert len(ours) == len(plain), name
        for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
            _assert_same(f"{name}[{number}]", one, other, tolerance)
    elif isinstance(plain, Tensor):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), name
        if plain.ndim == 0 or tolerance is not None:
            _assert_close(name, ours, plain, tolerance if plain.ndim else 0.0)
    else:
        assert ours == plain, name


def _assert_close(name, ours, plain, tolerance):
    """Assert that the largest difference is small relative to the largest value."""
    distance = (ours - plain).abs().max() / plain.abs().max().clamp(min=1e-30)
    assert distance <= tolerance, f"{name} is {distance:.1e} off; {tolerance} is allowed"
