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
"""Percentiles of the trials that bound the band."""

FACTORS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
"""Of Young's interval: what is tried."""


@dataclass(frozen=True)
class Band:
    """A figure over all trials: the mean, and the 5th and 95th percentile."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Band:
        """The band of `values`, one of each trial."""
        low, high = np.percentile(values, [LOW, HIGH])
        return cls(fmean(values), float(low), float(high))


@dataclass(frozen=True)
class Goodput:
    """What the trials of `model` found: `goodput`, the fraction of the wall time that counts;
    `wall` in seconds; `lost`, the mean fraction of the wall time by cause; `failures`, the mean
    count by class. `shown` is the trial whose goodput is the median. `unfinished` trials were given
    up before their work was done."""

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
        """How many times a second a failure left nothing of the run going on, over all trials."""
        seconds = sum(each.wall for each in self.outcomes)
        return sum(each.stops for each in self.outcomes) / seconds


def simulate(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> Goodput:
    """Simulate `model` so many times; `tick` is called after each trial.

    Trial k draws from the seed (seed, k), whatever the model: two models meet the same luck as far
    as they ask for it in the same order.
    """
    outcomes = []
    for number in range(trials):
        outcomes.append(run_trial(model, seed * 1_000_003 + number))
        tick()
    wall = sum(each.wall for each in outcomes)
    names = dict.fromkeys(each.name for each in model.failures)
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
    """One run of `model`, of islands or as a whole."""
    if model.islands > 1 or model.boundary:
        return IslandTrial(model, seed).run()
    return Trial(model, seed).run()


def stops_per_second(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> float:
    """How often a failure leaves nothing of the run going on: without islands each does, of islands
    it is counted in so many trials, in which intervals matter little."""
    if model.islands == 1:
        return model.failure_rate
    pilot = replace(model, interval=in_rounds(model.work / BINS, model))
    return simulate(pilot, trials, seed, tick).stop_rate


def intervals_around(model: RunModel, rate: float) -> list[float]:
    """Intervals to try where all stops at `rate` per second, seconds of work: from a quarter to
    four times that of Young (1974), or of the whole work where that is less, in whole rounds; where
    nothing ever fails, the whole work."""
    if not model.failure_rate:
        return [in_rounds(model.work, model)]
    middle = min(young(rate, model.save) / model.pace, model.work)
    tried = {in_rounds(min(middle * factor, model.work), model) for factor in FACTORS}
    return sorted(tried)


def in_rounds(interval: float, model: RunModel) -> float:
    """`interval` as a whole number of rounds of `model`, at least one; seconds of work."""
    return max(1, round(interval / model.round)) * model.round


def best_interval(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> tuple[float, list[tuple[float, Band]]]:
    """The interval with the best mean goodput, seconds of work, and the goodput of each tried."""
    found = []
    for interval in intervals_around(model, stops_per_second(model, trials, seed, tick)):
        made = simulate(replace(model, interval=interval), trials, seed, tick)
        found.append((interval, made.goodput))
    return max(found, key=lambda each: each[1].mean)[0], found
