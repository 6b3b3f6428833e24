"""Runs of ten days on 128 hosts, with a given number of failures per day."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from shardwise.tools.simulate.failure_classes import DAY, FailureClass, Topology
from shardwise.tools.simulate.goodput import simulate
from shardwise.tools.simulate.run_model import RunModel

HOSTS = Topology(hosts=128, devices_per_host=8, hosts_per_rack=4, racks_per_pod=8)


def failing(per_day: float, scope: str = "job", **more: float) -> FailureClass:
    """Return a class with this many failures per day over all components of HOSTS."""
    rate = per_day / DAY / HOSTS.components(scope)
    return FailureClass(name="it", title="it", scope=scope, rate=rate, per=scope, **more)  # type: ignore[arg-type]


def model(*failures: FailureClass, **more: float) -> RunModel:
    """Return a run of ten days on HOSTS."""
    given = {"work": 10 * DAY, "step": 10.0, "interval": 1000.0, "save": 20.0, "restart": 300.0}
    return RunModel(topology=HOSTS, failures=failures, **given | more)  # type: ignore[arg-type]


def check_goodput(made: RunModel, trials: int, one_by_one: Sequence[float]) -> None:
    """Check the mean goodput of some trials of `made` against runs simulated one by one.

    They must agree within three standard errors of both, which must be small.
    """
    folded = [outcome.goodput for outcome in simulate(made, trials, 0).outcomes]
    error = math.hypot(
        np.std(one_by_one) / math.sqrt(len(one_by_one)), np.std(folded) / math.sqrt(len(folded))
    )
    assert error < 0.01
    assert np.mean(folded) == pytest.approx(np.mean(one_by_one), abs=3 * error)
