"""Warm groups of ranks on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.group import Groups, Origin
from tests.phantom import building, rank
from tests.phantom.forking import Forked
from tests.phantom.report import Report, followed
from tests.system.warm import WarmPython

LIMIT = 120.0
"""Seconds that a case may take on a busy machine, because every operation runs through Python."""


class Phantom:
    """`phantom(size)` runs functions on `size` ranks, each with its own simulated device."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def reports(
        self, size: int, function: Callable[..., Any], *args: Any, **settings: Any
    ) -> list[Report]:
        """Return the report of `function(world, *args)` from every rank."""
        group = self._groups(size, device="cuda", **settings)
        return group(followed, function, *args, limit=LIMIT)

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, **settings: Any
    ) -> list[Any]:
        """Return its results by rank; fail if anything was not in order."""
        __tracebackhide__ = True
        reports = self.reports(size, function, *args, **settings)
        for number, report in enumerate(reports):
            assert not report.races, f"rank {number}:\n" + "\n".join(report.races[:5])
        return [report.result for report in reports]


@pytest.fixture(scope="session")
def phantom() -> Iterator[Phantom]:
    """Skip if no simulated device is possible; fail if g++ should build one and does not."""
    if reason := building.why_not():
        pytest.skip(reason)
    try:
        building.library()
    except building.NotBuilt as error:
        if "g++" in os.environ.get("TESTS_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    groups = Groups(Origin(Forked(), rank.main))
    yield Phantom(groups)
    groups.close()


@pytest.fixture(scope="session")
def warm_host() -> Iterator[WarmPython]:
    """Start a process without a device that programs are forked from."""
    made = WarmPython(processes=1)
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_device(phantom: Phantom) -> Iterator[WarmPython]:
    """Start a process with a simulated device that programs are forked from."""
    made = WarmPython("tests.phantom.warm", processes=1)
    yield made
    made.close()
