"""Promise 2: gradients are for the mean over all items of all workers and micro-batches.

Hypothesis draws the distribution of rows and weights. Each draw has many windows, because a call of
a group of ranks is slow. The reference is autograd in this process, over the items that count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw

FEW = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The input of a rank's backward: rows of random data whose loss counts `weight` items.

    With `nan` its data, and so its loss and gradients, are NaN.
    """

    rows: int
    weight: float
    nan: bool = False

    def data(self, place: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the part at `place`."""
        draw = torch.Generator().manual_seed(hash(place) % 2**31)
        x = torch.randn(self.rows, 5, generator=draw, dtype=torch.float64)
        y = torch.randn(self.rows, 2, generator=draw, dtype=torch.float64)
        return (x * math.nan if self.nan else x), y


Window = Sequence[Sequence[Part]]
"""The micro-batches of one step, each with a part for every rank."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Windows, and their reduction. `tells_last`: whether `last=` is passed."""

    windows: Sequence[Window]
    zero: int
    tells_last: bool


COUNTS = st.one_of(st.integers(1, 600).map(float), st.sampled_from([1e-3, 0.37, 1.0, 65536.0]))
WEIGHED = st.builds(Part, rows=st.integers(1, 4), weight=COUNTS)
WEIGHTLESS = st.builds(Part, rows=st.integers(1, 2), weight=st.just(0.0), nan=st.booleans())
PARTS = st.one_of(WEIGHED, WEIGHED, WEIGHTLESS)


def _runs(size: int) -> st.SearchStrategy[list[Run]]:
    micro_batch = st.lists(PARTS, min_size=size, max_size=size)
    window = st.lists(micro_batch, min_size=1, max_size=3)
    run = st.builds(
        Run,
        windows=st.lists(window, min_size=1, max_size=3),
        zero=st.sampled_from([0, 1, 2]),
        tells_last=st.booleans(),
    )
    return st.lists(run, min_size=2, max_size=3)


WAYS = [(0.0001, True), (0.0001, False), (0.0005, True), (25.0, False)]
"""Bucket size and overlap: every parameter alone, two together, all in one bucket."""


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
def test_every_reduction_gives_the_weighted_mean(group, size):
    @FEW
    @given(_runs(size))
    def check(runs):
        for run, *ranks in zip(runs, *group(size)(_steps_of_all, runs), strict=True):
            overlapped, waiting, *others = ranks[0]
            _assert_equal(overlapped, _plain_steps(run), 1e-9)
            _assert_equal(waiting, overlapped, 0.0)
            for steps in others:
                _assert_equal(steps, overlapped, 1e-12)
            for rank in ranks[1:]:
                _assert_equal(rank[0], overlapped, 0.0)

    check()


NAN = Part(rows=1, weight=0.0, nan=True)
NAMED = {
    "a rank's NaN at weight 0": [[[Part(rows=3, weight=3.0), NAN]]],
    "nothing weighs anything, then something": [[[NAN, NAN]], [[Part(rows=2, weight=5.0)] * 2]],
    "tokens": [[[Part(rows=2, weight=511.0), Part(rows=3, weight=17.0)]]],
    "a short second window": [
        [[Part(rows=2, weight=2.0)] * 2] * 3,
        [[NAN, Part(rows=1, weight=1.0)]],
    ],
}


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("windows", NAMED.values(), ids=NAMED)
def test_the_mean_in_cases_that_are_easily_wrong(group, windows, zero):
    run = Run(windows=windows, zero=zero, tells_last=True)
    for ways in group(2)(_steps_of_all, [run]):
        _assert_equal(ways[0][0], _plain_steps(run), 1e-9)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of one step: the gradient that it applied, and its statistics."""

    gradient: Tensor
    loss: float
    norm: float
    weight: float


def _model() -> nn.Module:
    """Return a model of two layers that every backward uses, and one that none uses."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(4, 4)])
    return model.double()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model[1](torch.tanh(model[0](x))) - y).square().mean()


def _steps_of_all(world, runs) -> list[list[list[Step]]]:
    """Return the steps of our engine for each run and each bucket size and overlap."""
    return [[_steps(world, run, *way) for way in WAYS] for run in runs]


def _steps(world, run: Run, bucket_mb: float, overlap: bool) -> list[Step]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = sw.Engine(model, optimizer, zero=run.zero, bucket_mb=bucket_mb, overlap=overlap)
    steps = []
    for number, window in enumerate(run.windows):
        for index, micro_batch in enumerate(window):
            part = micro_batch[world.rank]
            loss = _loss(model, *part.data((number, index, world.rank)))
            last = {"last": index == len(window) - 1} if run.tells_last else {}
            engine.backward(loss, weight=part.weight, **last)
        before = _flat(model)
        stats = engine.step()
        steps.append(
            Step(
                gradient=before - _flat(model),
                loss=stats.loss,
                norm=stats.grad_norm,
                weight=stats.weight,
            )
        )
    return steps


def _plain_steps(run: Run) -> list[Step]:
    """Return the steps of autograd on the same windows, without parts of weight 0."""
    model, steps = _model(), []
    for number, window in enumerate(run.windows):
        parts = {
            (number, index, rank): part
            for index, micro_batch in enumerate(window)
            for rank, part in enumerate(micro_batch)
            if part.weight
        }
        total = sum(part.weight for part in parts.values())
        loss = sum(_loss(model, *p.data(place)) * (p.weight / total) for place, p in parts.items())
        gradient = _gradient(model, loss)
        _descend(model, gradient)
        steps.append(
            Step(
                gradient=gradient,
                loss=float(loss.detach()) if parts else math.nan,
                norm=float(gradient.norm()),
                weight=total,
            )
        )
    return steps


def _gradient(model: nn.Module, loss: Tensor | int) -> Tensor:
    params = list(model.parameters())
    if not isinstance(loss, Tensor):
        return torch.zeros_like(_flat(model))
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def _descend(model: nn.Module, gradient: Tensor) -> None:
    values = _flat(model) - gradient
    nn.utils.vector_to_parameters(values, model.parameters())


def _flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _assert_equal(ours: Sequence[Step], wanted: Sequence[Step], tolerance: float) -> None:
    """Compare steps; the tolerance of a gradient is relative to its largest value."""
    for one, other in zip(ours, wanted, strict=True):
        distance = (one.gradient - other.gradient).abs().max()
        assert distance <= tolerance * other.gradient.abs().max()
        figures = (one.loss, one.norm, one.weight)
        expected = (other.loss, other.norm, other.weight)
        assert figures == pytest.approx(expected, rel=tolerance, abs=0.0, nan_ok=True)
