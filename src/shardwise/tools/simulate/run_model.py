"""A run as it is simulated, the causes of lost time, and the slowest of many devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from shardwise.tools.simulate.failure_classes import FailureClass, Topology

CAUSES = {
    "slowest": "waiting for the slowest device of each step",
    "slow": "devices that run slow for a while",
    "fewer": "fewer hosts than the run was made for",
    "saves": "saving",
    "boundaries": "making islands equal over the links between them",
    "lost": "work that was lost with what failed",
    "detection": "failures that nobody has noticed yet",
    "waiting": "waiting for hosts",
    "restart": "starting again",
    "rejoining": "islands that wait for the next boundary",
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

    Of several `islands`, groups of neighbouring hosts, or of neighbouring devices of the only host,
    all are made equal every `every` steps, for which they stand still for `boundary`; a failure
    stops only the islands that it hits.
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
    islands: int = 1
    every: int = 1
    boundary: float = 0.0

    @property
    def failure_rate(self) -> float:
        """Failures per second of all components that stop the run or an island of it, planned ones
        left out."""
        stopping = (each for each in self.failures if each.slowdown == 1 and not each.planned)
        return sum(each.rate_over(self.topology) for each in stopping)

    @property
    def round(self) -> float:
        """Seconds of work between two boundaries: what checkpoints are a multiple of apart."""
        return self.every * self.step

    @property
    def pace(self) -> float:
        """Wall seconds of a second of work, where no device is slow: with boundaries, no saves."""
        return self.slowest + self.boundary / self.round

    @property
    def units_per_host(self) -> int:
        """Of what islands are made: 1 where that is hosts, else the devices of one."""
        return self.topology.devices_per_host if self.islands > self.topology.hosts else 1

    def units_at(self, scope: str, place: int) -> range:
        """The units that go when component `place` of `scope` does; of a job none."""
        if scope == "device" and self.units_per_host > 1:
            return range(place, place + 1)
        hosts = self.topology.hosts_at(scope, place)
        return range(hosts.start * self.units_per_host, hosts.stop * self.units_per_host)

    @property
    def slowest(self) -> float:
        """Seconds that a step takes by one that no device delays: each step waits for the slowest
        device of its island, and each boundary for the slowest island."""
        mean, deviation = largest_of(self.topology.devices // self.islands)
        islands = largest_of(self.islands)[0] * deviation / math.sqrt(self.every)
        return 1.0 + self.jitter * (mean + islands)


@cache
def largest_of(count: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of `count` standard normal numbers: those of
    F^-1(U^(1/count)) over a uniform U."""
    normal, points = NormalDist(), 4000
    if count == 1:
        return 0.0, 1.0
    # The midpoint rule over log(-log U), which is smooth where count is large.
    low, high = math.log(1e-12), math.log(40.0)
    width = (high - low) / points
    total = squares = mass = 0.0
    for number in range(points):
        y = math.exp(low + (number + 0.5) * width)  # U = exp(-y), so U^(1/count) = exp(-y/count)
        weight = math.exp(-y) * y * width
        value = -normal.inv_cdf(min(-math.expm1(-y / count), 1 - 1e-16))
        total += weight * value
        squares += weight * value * value
        mass += weight
    mean = total / mass
    return mean, math.sqrt(squares / mass - mean * mean)


def slowest_of(count: int, jitter: float) -> float:
    """The mean of the slowest of `count` devices' times, by the mean of one, where each is normal
    with a standard deviation of `jitter`."""
    return 1.0 + jitter * largest_of(count)[0]


def young(rate: float, save: float) -> float:
    """The interval sqrt(2 save / rate) of Young (1974), seconds; `rate` is failures per second."""
    return math.sqrt(2 * save / rate) if rate else math.inf


def daly(rate: float, save: float) -> float:
    """The same as Daly (2006) has it in the first order, less the save itself; seconds."""
    return max(young(rate, save) - save, save)
