"""The model of a run, the causes of lost time, and the slowest of many devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from shardwise.tools.simulate.failure_classes import FailureClass, Topology

CAUSES = {
    "slowest": "waiting for the slowest device of each step",
    "slow": "devices that are slow for a while",
    "fewer": "fewer hosts than at the start",
    "saves": "saving",
    "boundaries": "synchronising islands over their links",
    "lost": "work lost in failures",
    "detection": "failures that are not noticed yet",
    "waiting": "waiting for hosts",
    "restart": "restarting",
    "rejoining": "islands that wait for the next boundary",
}
"""The causes of lost time, in words."""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """A run of `work` seconds of steps on all hosts of `topology`. Durations are in seconds.

    A step takes `step` on average over the devices. Each device varies from step to step by the
    fraction `jitter` (standard deviation). After every `interval` of work all devices wait for
    `save`; the checkpoint is complete after another `background`. A failure is noticed after at
    most `detect`, and a restart takes `restart` until its first step. `spares` hosts stand by. With
    at least `least` hosts the run continues without the missing ones, at a lower speed.

    `islands` are groups of neighbouring hosts, or of neighbouring devices of a single host. They
    synchronise every `every` steps, which stops them for `boundary`. A failure stops only the
    islands that it hits.
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
        """Failures per second of all components that stop the run, or an island of it.

        Planned failures are not counted.
        """
        # Slow devices and planned stops lose no work, so they do not matter for the interval of
        # saves.
        stopping = (each for each in self.failures if each.slowdown == 1 and not each.planned)
        return sum(each.rate_over(self.topology) for each in stopping)

    @property
    def round(self) -> float:
        """Seconds of work between two boundaries. Intervals of checkpoints are multiples of it."""
        return self.every * self.step

    @property
    def pace(self) -> float:
        """Wall seconds per second of work with boundaries, without saves or slow devices."""
        return self.slowest + self.boundary / self.round

    @property
    def units_per_host(self) -> int:
        """The units per host that islands consist of: 1 for whole hosts, else its devices."""
        return self.topology.devices_per_host if self.islands > self.topology.hosts else 1

    def units_at(self, scope: str, place: int) -> range:
        """Return the units that fail with component `place` of `scope` (none for a job)."""
        if scope == "device" and self.units_per_host > 1:
            return range(place, place + 1)
        hosts = self.topology.hosts_at(scope, place)
        return range(hosts.start * self.units_per_host, hosts.stop * self.units_per_host)

    @property
    def slowest(self) -> float:
        """The slowdown of a step by the random variation of devices.

        Each step waits for the slowest device of its island, and each boundary for the slowest
        island.
        """
        # Per island: only devices of the same island wait for each other at every step.
        mean, deviation = largest_of(self.topology.devices // self.islands)
        # Variations average out over a round: its deviation is a step's, divided by the square root
        # of the number of steps.
        islands = largest_of(self.islands)[0] * deviation / math.sqrt(self.every)
        return 1.0 + self.jitter * (mean + islands)


@cache
def largest_of(count: int) -> tuple[float, float]:
    """Return mean and standard deviation of the largest of `count` standard normal numbers.

    These are the moments of F^-1(U^(1/count)) over a uniform U.
    """
    normal, points = NormalDist(), 4000
    if count == 1:
        return 0.0, 1.0
    # The midpoint rule over log(-log U): there the integrand is smooth for large counts.
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
    """Return the mean time of the slowest of `count` devices, relative to one device's mean.

    Each device's time is normal with a standard deviation of `jitter`.
    """
    return 1.0 + jitter * largest_of(count)[0]


def young(rate: float, save: float) -> float:
    """Return the interval sqrt(2 save / rate) of Young (1974) in seconds; `rate` is per second."""
    return math.sqrt(2 * save / rate) if rate else math.inf


def daly(rate: float, save: float) -> float:
    """Return Daly's (2006) first-order interval in seconds: Young's less the save itself."""
    return max(young(rate, save) - save, save)
