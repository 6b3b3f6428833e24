"""Models a run: its parameters, the causes of lost time, and the slowest of many devices."""

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
    "reconnecting": "continuing after the loss of a host, and admitting other hosts",
    "rejoining": "islands that wait for the next boundary",
}
"""The causes of lost time, with their descriptions."""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The parameters of a run. All durations are in seconds.

    Attributes:
        topology: Hosts and devices of the run.
        failures: Kinds of failures.
        work: Total duration of the steps if no time were lost.
        step: Mean duration of a step over all devices.
        interval: Work between two checkpoints.
        save: Time for which a save blocks all devices.
        restart: Time from a restart to the first step after it.
        background: Further time until a checkpoint is complete.
        detect: Maximum time until a failure is noticed.
        jitter: Standard deviation of a device's step time, as a fraction of `step`.
        spares: Number of spare hosts.
        least: Minimum number of hosts. With fewer hosts than at the start, the run continues at a
            lower speed. If it is 0, the run needs one host with `reconnect`, and otherwise all.
        reconnect: Time from the detection of a lost host until the other hosts continue. If it is
            None, every failure stops the run.
        islands: Number of islands. They are groups of adjacent hosts, or of adjacent devices if
            there are more islands than hosts. A failure stops only the islands that it hits.
        every: Number of steps between two synchronisations of the islands.
        boundary: Time for which a synchronisation blocks the islands.
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
    reconnect: float | None = None
    islands: int = 1
    every: int = 1
    boundary: float = 0.0

    @property
    def failure_rate(self) -> float:
        """The number of failures per second that stop the run or one of its islands.

        Planned stops are not included.
        """
        # Slow devices and planned stops lose no work, so they do not affect the best checkpoint
        # interval.
        stopping = (each for each in self.failures if each.slowdown == 1 and not each.planned)
        rates = (each.rate_over(self.topology) for each in stopping if not self.survives(each))
        return sum(rates)

    def survives(self, failure: FailureClass) -> bool:
        """Return whether the other hosts continue after `failure`.

        They cannot if several hosts fail at once, because the second copies of a host's states are
        on the next host, or if the failure takes down no host, because all ranks then fail.
        """
        lost = self.topology.hosts_of(failure.scope)
        return self.reconnect is not None and lost == 1 < self.topology.hosts

    @property
    def round(self) -> float:
        """Seconds of work between two boundaries. Checkpoint intervals are multiples of it."""
        return self.every * self.step

    @property
    def pace(self) -> float:
        """Wall seconds per second of work, including boundaries and jitter.

        It excludes saves and temporary slowdowns.
        """
        return self.slowest + self.boundary / self.round

    @property
    def units_per_host(self) -> int:
        """The number of units per host.

        Islands consist of whole units. A unit is a host, or a device if islands are smaller than
        a host.
        """
        return self.topology.devices_per_host if self.islands > self.topology.hosts else 1

    def units_at(self, scope: str, place: int) -> range:
        """Return the units that fail if component `place` of `scope` fails (none for a job)."""
        if scope == "device" and self.units_per_host > 1:
            return range(place, place + 1)
        hosts = self.topology.hosts_at(scope, place)
        return range(hosts.start * self.units_per_host, hosts.stop * self.units_per_host)

    @property
    def slowest(self) -> float:
        """The factor by which jitter slows down steps.

        Each step waits for an island's slowest device, and each boundary for the slowest island.
        """
        # Only devices of the same island wait for each other in every step.
        mean, deviation = largest_of(self.topology.devices // self.islands)
        # Variations partly average out over a round: the standard deviation of the mean is the
        # standard deviation of a step, divided by the square root of the number of steps.
        islands = largest_of(self.islands)[0] * deviation / math.sqrt(self.every)
        return 1.0 + self.jitter * (mean + islands)


@cache
def largest_of(count: int) -> tuple[float, float]:
    """Return the mean and standard deviation of the largest of `count` standard normal numbers.

    These are the moments of F^-1(U^(1/count)) for the normal distribution function F and a uniform
    random number U.
    """
    normal, points = NormalDist(), 4000
    if count == 1:
        return 0.0, 1.0
    # Integrate over log(-log U) with the midpoint rule. In this variable, the integrand is smooth
    # even for large counts.
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


def young(rate: float, save: float) -> float:
    """Return Young's (1974) checkpoint interval sqrt(2 save / rate) in seconds.

    `rate` is the number of stops per second, and `save` is the duration of a save in seconds.
    """
    return math.sqrt(2 * save / rate) if rate else math.inf


def daly(rate: float, save: float) -> float:
    """Return Daly's (2006) first-order checkpoint interval in seconds.

    It is Young's interval minus the duration of a save, but at least `save`.
    """
    return max(young(rate, save) - save, save)
