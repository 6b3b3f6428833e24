"""Metrics computes exact means over all ranks, whatever the sizes of their batches."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import MetricsError, UsageError
from shardwise.world.world import World
from shardwise.world.world import current as current_world

Number = float | Tensor


class Metrics:
    """Weighted means of what a loop measures, over all its batches and all ranks.

        metrics = Metrics()
        with torch.no_grad():
            for x, y in loader:
                out = model(x)
                metrics.add(loss=loss_fn(out, y), accuracy=(out.argmax(1) == y).float().mean())
        print(metrics.compute())            # {"loss": ..., "accuracy": ...}, alike on all ranks

    A stand-in (the batch of a rank that has no samples left) counts for nothing.
    """

    def __init__(self) -> None:
        self._world = current_world()
        self._kind = _Sum if self._world.settings.exact is None else _ExactSum
        self._sums: dict[str, _Sum] = {}
        self._weights: dict[str, _Sum] = {}
        self._training = False  # whether autograd recorded when something was added last
        self._sat_out = self._world.current_batch.sat_out

    def add(self, n: Number | None = None, **means: Any) -> None:
        """Count `means`, each a mean over `n` items: numbers or tensors of one element.

        `n` (likewise) is by default the samples of the batch that a Loader gave
        last. Tensors are kept on their device in float64, where that has it; nothing waits for
        the device. Where the batch is a stand-in, or `n` is 0, the values are ignored, NaN too.

        Raises UsageError without `n` where no Loader gave a batch, MetricsError for an `n` below
        0 or a value that is not a scalar, UsageError for a metric called `weight`, as the items of
        engine.backward are.
        """
        if "weight" in means:
            raise UsageError(
                "metrics.add(weight=...) would be the mean of a metric called weight: the number "
                "of items is metrics.add(n=...)."
            )
        self._training = torch.is_grad_enabled()
        weight = _weight(self._world, n)
        values = {name: _scalar(name, mean) for name, mean in means.items()}
        for name, value in values.items():
            product: Number = 0.0
            if isinstance(weight, Tensor):
                product = torch.where(weight != 0, weight * value, torch.zeros_like(weight))
            elif weight != 0:
                product = value * weight
            self._sums.setdefault(name, self._kind()).add(product)
            self._weights.setdefault(name, self._kind()).add(weight)

    def compute(self) -> dict[str, float]:
        """The means over all that was added on all ranks since the last call; then start over.

        One collective round, so every rank must come. A mean over no items is NaN. Raises
        MetricsError, on all ranks alike, where ranks measured different things or a weight is
        below 0; nothing is forgotten then.
        """
        own = {name: (self._sums[name].told(), self._weights[name].told()) for name in self._sums}
        # A rank that had no batch of an evaluation has measured nothing, and nothing is amiss.
        idle = not own and self._world.current_batch.sat_out > self._sat_out
        ranks = _with_idle(self._world.gather(None if idle else own))
        _check_names(ranks)
        _check_weights(ranks)
        self._sums, self._weights = {}, {}
        self._sat_out = self._world.current_batch.sat_out
        # The ranks of a replica have measured the same: it counts once.
        counted = ranks[:: self._world.mesh.replica]
        means = {name: _mean([rank[name] for rank in counted]) for name in ranks[0]}
        self._world.step_log.measured(means, training=self._training)
        return means


Totals = dict[str, tuple[list[float], list[float]]]
"""Of one rank: numbers that make up the weighted sum, and the weight, by name."""


NOTHING: tuple[list[float], list[float]] = ([0.0], [0.0])
"""The weighted sum and the weight of a rank that has measured nothing."""


class _Sum:
    """A running sum."""

    def __init__(self) -> None:
        self._total: Number = 0.0

    def add(self, value: Number) -> None:
        """Count one more."""
        self._total = self._total + value

    def told(self) -> list[float]:
        """Numbers whose sum it is."""
        return [float(self._total)]


class _ExactSum(_Sum):
    """The same without rounding, for the exact mode: as a few numbers whose digits do not overlap
    (Shewchuk, 1997). So it does not matter which rank has counted what. Waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[float] = []

    def add(self, value: Number) -> None:
        rest = float(value)
        if not math.isfinite(rest):
            super().add(rest)
            return
        parts = []
        for part in self._parts:
            large, small = sorted((rest, part), key=abs, reverse=True)
            rest = large + small
            if lost := small - (rest - large):
                parts.append(lost)
        self._parts = [*parts, rest]

    def told(self) -> list[float]:
        return [*super().told(), *self._parts]


def _weight(world: World, n: Any) -> Number:
    batch = world.current_batch.batch
    if batch is not None and batch.samples == 0:
        return 0.0
    if n is None:
        if batch is None:
            raise UsageError(
                "Metrics.add cannot tell how many items these are means over, since no Loader "
                "gave a batch: write metrics.add(n=len(x), ...)."
            )
        return float(batch.samples)
    weight = _scalar("n", n)
    if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
        raise MetricsError(f"Metrics.add takes an n of 0 or more, not {n!r}.")
    return weight


def _scalar(name: str, value: Any) -> Number:
    """`value` as a float, or as a tensor in the widest float of its device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise MetricsError(
                f"Metrics.add takes numbers and tensors of one element, but {name} is a tensor of "
                f"shape {tuple(value.shape)} and dtype {value.dtype}: give its mean, and n=."
            )
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        return value.detach().reshape(()).to(wide)
    if isinstance(value, Real):
        return float(value)
    raise MetricsError(
        "Metrics.add takes numbers and tensors of one element, but "
        f"{name} is a {type(value).__name__}."
    )


def _mean(totals: list[tuple[list[float], list[float]]]) -> float:
    weight = math.fsum(weight for _, weights in totals for weight in weights)
    sums = [value for values, _ in totals for value in values]
    if weight == 0:
        return math.nan
    # fsum raises where infinities of both signs meet; plain addition gives the NaN they make
    return (math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)) / weight


def _with_idle(ranks: list[Totals | None]) -> list[Totals]:
    """What the ranks told, with nothing measured on those that were idle."""
    measured = next((rank for rank in ranks if rank is not None), {})
    return [dict.fromkeys(measured, NOTHING) if rank is None else rank for rank in ranks]


def _check_names(ranks: list[Totals]) -> None:
    if all(rank.keys() == ranks[0].keys() for rank in ranks):
        return
    found: dict[tuple[str, ...], list[str]] = {}
    for number, rank in enumerate(ranks):
        found.setdefault(tuple(sorted(rank)), []).append(str(number))
    said = "; ".join(
        f"rank(s) {', '.join(numbers)}: {', '.join(names) or 'nothing'}"
        for names, numbers in found.items()
    )
    raise MetricsError(
        f"Ranks disagree on what they measured ({said}). Every rank must add the same names, "
        "also for a batch whose values do not matter to it."
    )


def _check_weights(ranks: list[Totals]) -> None:
    for number, rank in enumerate(ranks):
        for name, (_, weights) in rank.items():
            weight = sum(weights)
            if not 0 <= weight < math.inf:
                raise MetricsError(
                    f"{name} was added on rank {number} with a total n of {weight}; "
                    "n is a number of items, 0 or more."
                )
