"""Goodput: many trials of a run, their spread, and the best interval between checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from shardwise.tools.simulate.island_trial import IslandTrial
from shardwise.tools.simulate.outcome import BINS, Outcome
from shardwise.tools.simulate.run_model import CAUSES, RunModel, young
from shardwise.tools.simulate.trial import Trial

LOW, HIGH = 5, 95
"""The percentiles of the trials that bound the band."""

FACTORS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
"""The intervals to try, as multiples of Young's."""


@dataclass(frozen=True)
class Band:
    """A figure over all trials: its mean, and its 5th and 95th percentile."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Band:
        """Return the band of `values`, which has one value per trial."""
        low, high = np.percentile(values, [LOW, HIGH])
        return cls(fmean(values), float(low), float(high))


@dataclass(frozen=True)
class Goodput:
    """The result of the trials of `model`.

    `goodput` is the fraction of the wall time that counts, `wall` the wall time in seconds, `lost`
    the mean fraction of the wall time by cause, `failures` the mean count by class. `shown` is the
    trial with the median goodput. `unfinished` trials were stopped before their work was done.
    """

    model: RunModel
    outcomes: tuple[Outcome, ...]
    goodput: Band
    wall: Band
    lost: dict[str, float]
    failures: dict[str, float]
    shown: Outcome
    unfinished: int

    @property
    def stop_rate(self) -> float:
        """The number of stops of the whole run per second, over all trials."""
        seconds = sum(each.wall for each in self.outcomes)
        return sum(each.stops for each in self.outcomes) / seconds


def simulate(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> Goodput:
    """Simulate `model` in `trials` trials, and call `tick` after each.

    Trial k draws from the seed (seed, k) for every model. So two models see the same random numbers
    as far as they draw them in the same order.
    """
    outcomes = []
    for number in range(trials):
        # A large factor, so that trials of neighbouring seeds do not share random numbers.
        outcomes.append(run_trial(model, seed * 1_000_003 + number))
        tick()
    # Weighted by time: a long trial has more of each cause.
    wall = sum(each.wall for each in outcomes)
    names = dict.fromkeys(each.name for each in model.failures)
    # The page shows the median run: an average of runs would show no single failure.
    by_goodput = sorted(outcomes, key=lambda each: each.goodput)
    return Goodput(
        model=model,
        outcomes=tuple(outcomes),
        goodput=Band.of([each.goodput for each in outcomes]),
        wall=Band.of([each.wall for each in outcomes]),
        lost={cause: sum(each.lost[cause] for each in outcomes) / wall for cause in CAUSES},
        failures={name: fmean(each.failures.get(name, 0) for each in outcomes) for name in names},
        shown=by_goodput[trials // 2],
        unfinished=sum(not each.whole for each in outcomes),
    )


def run_trial(model: RunModel, seed: int) -> Outcome:
    """Simulate one run of `model`, with islands or as a whole."""
    # A run without islands has a boundary at every step if gradients cross slow links.
    if model.islands > 1 or model.boundary:
        return IslandTrial(model, seed).run()
    return Trial(model, seed).run()


def stops_per_second(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> float:
    """Return how often a failure stops the whole run.

    Without islands every failure does. With islands the stops of some trials are counted. The
    interval matters little for their number.
    """
    if model.islands == 1:
        return model.failure_rate
    # The rate of stops decides which intervals are worth trying, so it comes first.
    pilot = replace(model, interval=in_rounds(model.work / BINS, model))
    return simulate(pilot, trials, seed, tick).stop_rate


def intervals_around(model: RunModel, rate: float) -> list[float]:
    """Return the intervals to try, in seconds of work, if the run stops `rate` times per second.

    They range from a quarter of Young's interval (1974) to four times that, but at most the whole
    work, in whole rounds. Without failures the only interval is the whole work.
    """
    if not model.failure_rate:
        return [in_rounds(model.work, model)]
    middle = min(young(rate, model.save) / model.pace, model.work)
    tried = {in_rounds(min(middle * factor, model.work), model) for factor in FACTORS}
    return sorted(tried)


def in_rounds(interval: float, model: RunModel) -> float:
    """Round `interval` to whole rounds of `model`, at least one, in seconds of work."""
    return max(1, round(interval / model.round)) * model.round


def best_interval(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> tuple[float, list[tuple[float, Band]]]:
    """Return the interval with the best mean goodput, and the goodput of each that was tried."""
    tried = []
    for interval in intervals_around(model, stops_per_second(model, trials, seed, tick)):
        goodput = simulate(replace(model, interval=interval), trials, seed, tick)
        tried.append((interval, goodput.goodput))
    return max(tried, key=lambda each: each[1].mean)[0], tried
