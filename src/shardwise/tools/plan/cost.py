"""Computes the total cost of a run in days, dollars and kilowatt-hours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from shardwise.tools.plan.cluster import Cluster

DAY, HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Cost:
    """The cost of a run.

    Days and dollars have a lower and an upper bound. Dollars are based on the catalogue's lowest
    and highest prices per hour, and are None if it lists no price. `kwh` assumes that devices and
    hosts run at full power, and excludes cooling and the network. It is None if the catalogue does
    not list their power.
    """

    days: float
    days_low: float
    days_high: float
    dollars_low: float | None
    dollars_high: float | None
    kwh: float | None

    @property
    def dollars(self) -> float | None:
        """The mean of the lower and upper bound in dollars, or None if the price is unknown."""
        if self.dollars_low is None or self.dollars_high is None:
            return None
        return (self.dollars_low + self.dollars_high) / 2

    @property
    def dollar_range(self) -> str:
        """The lower and upper bound in dollars, such as "5-29", or "-" if the price is unknown."""
        if self.dollars_low is None or self.dollars_high is None:
            return "-"
        return f"{self.dollars_low:,.0f}-{self.dollars_high:,.0f}"


def cost_of(
    seconds: float, error: float, steps: float, cluster: Cluster, devices: int | None = None
) -> Cost:
    """Return the cost of `steps` steps that take `seconds` each.

    The steps run on `devices` devices of `cluster`, or on all of them if `devices` is None. `error`
    is the error band of `seconds`, as a fraction.
    """
    # Hosts are rented as a unit, so idle devices on a rented host cost money too.
    rented = cluster if devices is None else cluster.part(devices)
    device = rented.device
    total = seconds * steps
    hours = rented.devices * total / HOUR
    low, high = device.number("dollars_low"), device.number("dollars_high")
    watts, host = device.number("watts"), device.number("host_watts")
    kwh = None
    if watts is not None:
        # `host_watts` excludes the devices of the host.
        draw = rented.devices * watts + (rented.hosts * host if host else 0.0)
        kwh = draw / 1e3 * total / HOUR
    return Cost(
        total / DAY,
        total * (1 - error) / DAY,
        total * (1 + error) / DAY,
        None if low is None else low * hours * (1 - error),
        None if high is None else high * hours * (1 + error),
        kwh,
    )


def is_within(cost: Cost, days: float | None, dollars: float | None) -> bool:
    """Return whether the midpoint estimates of `cost` are within the limits `days` and `dollars`.

    A limit of None means no limit. An unknown price counts as within the limit.
    """
    if days is not None and cost.days > days:
        return False
    return dollars is None or cost.dollars is None or cost.dollars <= dollars


Item = TypeVar("Item")


def frontier(items: Iterable[tuple[float, float, Item]]) -> list[tuple[float, float, Item]]:
    """Return the Pareto frontier of items (days, dollars, item), sorted by days."""
    best: list[tuple[float, float, Item]] = []
    # In order of days, an item is on the frontier if it costs less than all items before it.
    for days, dollars, item in sorted(items, key=lambda each: each[:2]):
        if not best or dollars < best[-1][1]:
            best.append((days, dollars, item))
    return best
