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
"""Seconds that a case may take on a busy machine: each operation passes through Python."""


class Phantom:
    """`phantom(size)` runs functions on `size` ranks, each with a simulated device of its own."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def reports(
        self, size: int, function: Callable[..., Any], *args: Any, **settings: Any
    ) -> list[Report]:
        """What `function(world, *args)` showed, by rank."""
        group = self._groups(size, device="cuda", **settings)
        return group(followed, function, *args, limit=LIMIT)

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, **settings: Any
    ) -> list[Any]:
        """What it returned, by rank; fails where anything was not in order."""
        __tracebackhide__ = True
        reports = self.reports(size, function, *args, **settings)
        for number, report in enumerate(reports):
            assert not report.races, f"rank {number}:\n" + "\n".join(report.races[:5])
        return [report.result for report in reports]


@pytest.fixture(scope="session")
def phantom() -> Iterator[Phantom]:
    """Skips where no simulated device can be had; one that g++ is to build must be."""
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
    """A process without a device, which programs are forked from."""
    made = WarmPython(processes=1)
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_device(phantom: Phantom) -> Iterator[WarmPython]:
    """A process with a simulated device, which programs are forked from."""
    made = WarmPython("tests.phantom.warm", processes=1)
    yield made
    made.close()
