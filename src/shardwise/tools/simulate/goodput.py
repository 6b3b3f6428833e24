"""Estimates the goodput of a run from many trials, and finds the best checkpoint interval."""

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
"""Percentiles of the trials' values at the bounds of a band."""

FACTORS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
"""Checkpoint intervals to try, as multiples of Young's interval."""


@dataclass(frozen=True)
class Band:
    """Statistics of a value over all trials: its mean, and its 5th and 95th percentiles."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Band:
        """Return the band of `values`, one per trial."""
        low, high = np.percentile(values, [LOW, HIGH])
        return cls(fmean(values), float(low), float(high))


@dataclass(frozen=True)
class Goodput:
    """The result of many trials of `model`.

    Attributes:
        model: The model.
        outcomes: The outcome of each trial.
        goodput: Useful fraction of the wall time.
        wall: Wall time in seconds.
        lost: Fraction of the wall time that was lost, by cause, over all trials.
        failures: Mean number of failures per trial, by class.
        shown: Outcome of the trial with the median goodput.
        unfinished: Number of trials that were stopped before their work was done.
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
        """The number of times per second that the entire run stops, over all trials."""
        seconds = sum(each.wall for each in self.outcomes)
        return sum(each.stops for each in self.outcomes) / seconds


def simulate(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> Goodput:
    """Simulate `model` in `trials` trials, and call `tick` after each trial.

    The seed of trial k depends only on `seed` and k. Two models therefore see the same random
    numbers as long as they draw them in the same order, which makes their comparison less noisy.
    """
    outcomes = []
    for number in range(trials):
        # A large factor, so that trials with consecutive values of `seed` have different seeds.
        outcomes.append(run_trial(model, seed * 1_000_003 + number))
        tick()
    # Weight the trials by their wall time, because a long trial has more lost time.
    wall = sum(each.wall for each in outcomes)
    names = dict.fromkeys(each.name for each in model.failures)
    # The page shows the median trial, because an average of trials would not show single failures.
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
    """Simulate one run of `model`, with or without islands."""
    # IslandTrial also simulates boundaries. A run without islands has one at every step if its
    # gradients cross slow links.
    if model.islands > 1 or model.boundary:
        return IslandTrial(model, seed).run()
    return Trial(model, seed).run()


def stops_per_second(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> float:
    """Return how many failures per second stop the entire run.

    Without islands, every failure does. With islands, the rate is measured in a few trials. Their
    checkpoint interval hardly affects it.
    """
    if model.islands == 1:
        return model.failure_rate
    # Use an arbitrary interval, because the rate is needed to choose the intervals to try.
    pilot = replace(model, interval=in_rounds(model.work / BINS, model))
    return simulate(pilot, trials, seed, tick).stop_rate


def intervals_around(model: RunModel, rate: float) -> list[float]:
    """Return the checkpoint intervals to try, in seconds of work.

    They range from a quarter of Young's interval (1974) to four times that interval, for a run that
    stops `rate` times per second. They are rounded to whole rounds, and none is longer than the
    run. Without failures, only the run's length is returned.
    """
    if not model.failure_rate:
        return [in_rounds(model.work, model)]
    middle = min(young(rate, model.save) / model.pace, model.work)
    tried = {in_rounds(min(middle * factor, model.work), model) for factor in FACTORS}
    return sorted(tried)


def in_rounds(interval: float, model: RunModel) -> float:
    """Round `interval` (seconds of work) to whole rounds of `model`, at least one."""
    return max(1, round(interval / model.round)) * model.round


def best_interval(
    model: RunModel, trials: int, seed: int, tick: Callable[[], None] = lambda: None
) -> tuple[float, list[tuple[float, Band]]]:
    """Return the interval with the best mean goodput, and all (interval, goodput) pairs tried."""
    tried = []
    for interval in intervals_around(model, stops_per_second(model, trials, seed, tick)):
        goodput = simulate(replace(model, interval=interval), trials, seed, tick)
        tried.append((interval, goodput.goodput))
    return max(tried, key=lambda each: each[1].mean)[0], tried
