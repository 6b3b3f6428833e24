"""Compares the checks of all hosts, and formats tables and advice. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from shardwise.messages.printable import printable
from shardwise.tools.doctor.checks import Check
from shardwise.tools.doctor.network import Speed

ALIKE = ("Python", "torch", "shardwise")
"""Versions that must be equal: ranks of different versions may compute or communicate
differently."""

CLOCKS = 1.0
"""Clocks may differ by this many seconds before logs and file times mislead."""

Hosts = Mapping[str, Sequence[Check]]


def table(hosts: Hosts) -> Table:
    """Return a table with a row per check and a column per host."""
    grid = Table(show_header=len(hosts) > 1, box=None)
    grid.add_column("")
    for host in hosts:
        grid.add_column(Text(printable(host)), overflow="fold")
    # In order of first appearance. Hosts may have different checks, such as offload folders.
    names = dict.fromkeys(check.name for checks in hosts.values() for check in checks)
    for name in names:
        shown = [
            next((check.shown for check in checks if check.name == name), "")
            for checks in hosts.values()
        ]
        grid.add_row(name, *(Text(printable(each)) for each in shown))
    return grid


def faults(hosts: Hosts) -> list[str]:
    """Return the reasons why a run would fail, each with a remedy."""
    return [*_said(hosts, "fault"), *_versions(hosts)]


def advice(hosts: Hosts) -> list[str]:
    """Return the reasons why a run might be slow or misleading, each with a remedy."""
    return _said(hosts, "advice")


def clock(offset: float | None) -> Check:
    """Return the check of a host's clock, `offset` seconds ahead of rank 0's (None if unknown)."""
    if offset is None:
        return Check("clock", "unknown: rank 0 did not answer")
    far = abs(offset) > CLOCKS
    return Check(
        "clock",
        f"{offset:+.3f} s",
        advice="its clock is wrong, so logs and file times mislead: start chrony or ntpd."
        if far
        else "",
    )


def speeds(speed_of: Mapping[str, Speed]) -> list[str]:
    """Return a line for each measured group of ranks."""
    return [
        f"all-reduce {where}: {speed.latency * 1e3:.2f} ms for 4 KB, "
        f"{speed.bandwidth / 1e9:.2f} GB/s for 16 MB"
        for where, speed in speed_of.items()
    ]


def _said(hosts: Hosts, kind: str) -> list[str]:
    return [
        f"{host}: {check.name}: {text}"
        for host, checks in hosts.items()
        for check in checks
        if (text := getattr(check, kind))
    ]


def _versions(hosts: Hosts) -> list[str]:
    differences = []
    for name in ALIKE:
        shown = {
            host: check.shown
            for host, checks in hosts.items()
            for check in checks
            if check.name == name
        }
        # Compare texts: a local build ("2.9.0+cu126") differs from a release, too.
        if len(set(shown.values())) > 1:
            each = ", ".join(f"{value} on {host}" for host, value in shown.items())
            differences.append(f"{name} differs: {each}. Install the same version on all hosts.")
    return differences
