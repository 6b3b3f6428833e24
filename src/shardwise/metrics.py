"""Computes exact means across all ranks, for batches of any size."""

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
    """Weighted means over all batches of a loop, across all ranks.

    A batch's weight is its number of samples. A stand-in (the batch of a rank that has no samples)
    has weight 0.

    Example:
        metrics = sw.Metrics()
        with torch.no_grad():
            for x, y in loader:
                out = model(x)
                metrics.add(loss=loss_fn(out, y), accuracy=(out.argmax(1) == y).float().mean())
        print(metrics.compute())  # {"loss": ..., "accuracy": ...}, the same on all ranks
    """

    def __init__(self) -> None:
        self._world = current_world()
        self._kind = _Sum if self._world.settings.exact is None else _ExactSum
        self._sums: dict[str, _Sum] = {}
        self._weights: dict[str, _Sum] = {}
        self._training = False  # whether autograd was on at the last `add`
        self._skipped_before = self._world.current_batch.skipped_batches

    def add(self, n: Number | None = None, **means: Any) -> None:
        """Add means that were computed over `n` items on this rank.

        Tensors stay on their device (in float64 if the device supports it), so this never
        synchronises. If the batch is a stand-in (a repeated sample for a rank without rows) or `n`
        is 0, the values are ignored, even if they are NaN.

        Args:
            n: Number of items, as a number or a tensor with one element, at least 0. Default: the
                number of samples in the Loader's last batch.
            **means: Means by name, as numbers or tensors with one element.

        Raises:
            UsageError: If `n` is not passed and there is no current batch, or if a metric is called
                `weight` (which is the name of `n` in `engine.backward`).
            MetricsError: If `n` is below 0, or a value is not a scalar.

        Example:
            >>> import shardwise as sw
            >>> world = sw.init()
            >>> metrics = sw.Metrics()
            >>> metrics.add(n=1, loss=4.0)
            >>> metrics.add(n=3, loss=2.0)
            >>> metrics.compute()
            {'loss': 2.5}
        """
        if "weight" in means:
            raise UsageError(
                "metrics.add(weight=...) would add a metric called weight. To set the number of "
                "items, write metrics.add(n=...)."
            )
        # The step log distinguishes training from evaluation.
        self._training = torch.is_grad_enabled()
        weight = _weight(self._world, n)
        values = {name: _scalar(name, mean) for name, mean in means.items()}
        for name, value in values.items():
            product: Number = 0.0
            if isinstance(weight, Tensor):
                # Don't use weight * value alone: a stand-in's values may be NaN, as is 0 * NaN.
                product = torch.where(weight != 0, weight * value, torch.zeros_like(weight))
            elif weight != 0:
                product = value * weight
            self._sums.setdefault(name, self._kind()).add(product)
            self._weights.setdefault(name, self._kind()).add(weight)

    def compute(self) -> dict[str, float]:
        """Return the means over everything that any rank has added since the last call, and reset.

        Collective, with a single exchange. A mean over no items is NaN.

        Raises:
            MetricsError: Ranks added different names, or a total weight is below 0. It is raised on
                all ranks, and nothing is reset.
        """
        own = {name: (self._sums[name].parts(), self._weights[name].parts()) for name in self._sums}
        # A rank without a batch in an uneven evaluation has measured nothing. Count it with weight
        # 0 instead of treating it as a rank that forgot a name.
        idle = not own and self._world.current_batch.skipped_batches > self._skipped_before
        gathered = self._world.gather(None if idle else own)
        names = next((rank for rank in gathered if rank is not None), {})
        ranks = [dict.fromkeys(names, NOTHING) if rank is None else rank for rank in gathered]
        _check_names(ranks)
        _check_weights(ranks)
        self._sums, self._weights = {}, {}
        self._skipped_before = self._world.current_batch.skipped_batches
        # The ranks of a replica have measured the same batches, so count one rank per replica.
        counted = ranks[:: self._world.mesh.replica]
        means = {name: _mean([rank[name] for rank in counted]) for name in ranks[0]}
        self._world.step_log.measured(means, training=self._training)
        return means


Totals = dict[str, tuple[list[float], list[float]]]
"""Maps a metric's name to one rank's weighted sum and weight. Each is the sum of a list of
numbers."""


NOTHING: tuple[list[float], list[float]] = ([0.0], [0.0])
"""Weighted sum and weight for a rank that has measured nothing."""


class _Sum:
    def __init__(self) -> None:
        self._total: Number = 0.0

    def add(self, value: Number) -> None:
        self._total = self._total + value

    def parts(self) -> list[float]:
        """Return numbers that add up to this sum."""
        return [float(self._total)]


class _ExactSum(_Sum):
    """A running sum without rounding, for exact mode. Reading it synchronises with the device.

    It consists of a few numbers whose digits do not overlap (Shewchuk, 1997), so the total does not
    depend on how values are distributed across ranks.
    """

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
            if lost := small - (rest - large):  # the rounding error, exactly (Dekker's TwoSum)
                parts.append(lost)
        self._parts = [*parts, rest]

    def parts(self) -> list[float]:
        return [*super().parts(), *self._parts]


def _weight(world: World, n: Any) -> Number:
    batch = world.current_batch.batch
    # This applies even if `n` is passed, because a stand-in's rows belong to another rank.
    if batch is not None and batch.samples == 0:
        return 0.0
    if n is None:
        if world.context_size > 1:
            raise UsageError(
                "Metrics.add does not know the number of items of these means, because --context "
                f"{world.context_size} cuts the sequences: pass this worker's number of tokens, as "
                "in metrics.add(n=int((labels != -100).sum()), ...)."
            )
        if batch is None:
            raise UsageError(
                "Metrics.add does not know the number of items of these means, because no Loader "
                "has returned a batch: write metrics.add(n=len(x), ...)."
            )
        return float(batch.samples)
    weight = _scalar("n", n)
    # Don't read a tensor, which would synchronise; `compute` checks the totals.
    if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
        raise MetricsError(f"Metrics.add takes an n of 0 or more, not {n!r}.")
    return weight


def _scalar(name: str, value: Any) -> Number:
    """Return `value` as a float, or as a 0-dim tensor in the widest float dtype of its device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise MetricsError(
                f"Metrics.add takes numbers and tensors of one element, but {name} is a tensor of "
                f"shape {tuple(value.shape)} and dtype {value.dtype}: pass its mean, and n=."
            )
        # MPS has no float64.
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
    # fsum rounds once, so the mean does not depend on the number of ranks. It raises for infinities
    # of both signs; plain addition returns their NaN.
    return (math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)) / weight


def _check_names(ranks: list[Totals]) -> None:
    if all(rank.keys() == ranks[0].keys() for rank in ranks):
        return
    ranks_by_names: dict[tuple[str, ...], list[str]] = {}
    for number, rank in enumerate(ranks):
        ranks_by_names.setdefault(tuple(sorted(rank)), []).append(str(number))
    differences = "; ".join(
        f"rank(s) {', '.join(numbers)}: {', '.join(names) or 'nothing'}"
        for names, numbers in ranks_by_names.items()
    )
    raise MetricsError(
        f"Ranks added different metrics ({differences}). Add the same names on every rank, even "
        "for a batch whose values do not count."
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
