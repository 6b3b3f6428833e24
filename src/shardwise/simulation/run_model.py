"""A run as it is simulated, the causes of lost time, and the slowest of many devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from shardwise.simulation.failure_classes import FailureClass, Topology

CAUSES = {
    "slowest": "waiting for the slowest device of each step",
    "slow": "devices that run slow for a while",
    "fewer": "fewer hosts than the run was made for",
    "saves": "saving",
    "lost": "work since the last checkpoint",
    "detection": "failures that nobody has noticed yet",
    "waiting": "waiting for hosts",
    "restart": "starting again",
}
"""The causes of lost time, in words."""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A run of `work` seconds of steps, on all hosts of `topology`; durations are in seconds.

    A step takes `step` in the mean of its devices, each of which varies by the fraction `jitter`
    (standard deviation) from step to step. Every `interval` of work all wait for `save`, and the
    checkpoint counts `background` after that. A failure is noticed after `detect` at most, and a
    start until the first step takes `restart`. `spares` hosts stand by. While there are at least
    `least` hosts the run goes on without the missing ones, at their share of the speed.
    """

    topology: Topology
    failures: tuple[FailureClass, ...]
    work: float
    step: float
    interval: float
    save: float
    restart: float
    background: float = 0.0
    detect: float = math.inf
    jitter: float = 0.0
    spares: int = 0
    least: int = 0

    @property
    def failure_rate(self) -> float:
        """Failures per second of all components that stop the run, planned ones left out."""
        return sum(
            self.topology.components(each.scope) * each.rate
            for each in self.failures
            if each.slowdown == 1 and not each.planned
        )


def slowest_of(count: int, jitter: float) -> float:
    """The mean of the slowest of `count` devices' times, by the mean of one, where each is normal
    with a standard deviation of `jitter`: the mean of F^-1(U^(1/count)) over a uniform U."""
    if jitter == 0 or count == 1:
        return 1.0
    normal, points = NormalDist(), 4000
    # The midpoint rule over log(-log U), which is smooth where count is large.
    low, high = math.log(1e-12), math.log(40.0)
    width = (high - low) / points
    total = mass = 0.0
    for number in range(points):
        y = math.exp(low + (number + 0.5) * width)  # U = exp(-y), so U^(1/count) = exp(-y/count)
        weight = math.exp(-y) * y * width
        total += weight * -normal.inv_cdf(min(-math.expm1(-y / count), 1 - 1e-16))
        mass += weight
    return 1.0 + jitter * total / mass


def young(rate: float, save: float) -> float:
    """The interval sqrt(2 save / rate) of Young (1974), seconds; `rate` is failures per second."""
    return math.sqrt(2 * save / rate) if rate else math.inf


def daly(rate: float, save: float) -> float:
    """The same as Daly (2006) has it in the first order, less the save itself; seconds."""
    return max(young(rate, save) - save, save)
