"""Compares the checks of all hosts, and formats tables and advice. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from shardwise.messages.printable import printable
from shardwise.tools.doctor.checks import Check
from shardwise.tools.doctor.network import Speed

ALIKE = ("Python", "torch", "shardwise")
"""Checks of versions that must be identical on all hosts. With different versions, ranks may
compute or communicate differently."""

CLOCKS = 1.0
"""Clocks may differ by at most this many seconds. Otherwise logs and file times are misleading."""

Hosts = Mapping[str, Sequence[Check]]


def table(hosts: Hosts) -> Table:
    """Return a table with one row per check and one column per host."""
    grid = Table(show_header=len(hosts) > 1, box=None)
    grid.add_column("")
    for host in hosts:
        grid.add_column(Text(printable(host)), overflow="fold")
    # In order of first appearance, because hosts may have different checks (offload folders, for
    # example).
    names = dict.fromkeys(check.name for checks in hosts.values() for check in checks)
    for name in names:
        shown = [
            next((check.shown for check in checks if check.name == name), "")
            for checks in hosts.values()
        ]
        grid.add_row(name, *(Text(printable(each)) for each in shown))
    return grid


def faults(hosts: Hosts) -> list[str]:
    """Return why a run would fail: one line per reason, with a remedy."""
    return [*_said(hosts, "fault"), *_versions(hosts)]


def advice(hosts: Hosts) -> list[str]:
    """Return why a run might be slow or misleading: one line per reason, with a remedy."""
    return _said(hosts, "advice")


def clock(offset: float | None) -> Check:
    """Check a host's clock, which is `offset` seconds ahead of rank 0's (None if unknown)."""
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
    """Return one line per measured group of ranks."""
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
        # Compare as strings, because a local build ("2.9.0+cu126") also differs from a release.
        if len(set(shown.values())) > 1:
            each = ", ".join(f"{value} on {host}" for host, value in shown.items())
            differences.append(f"{name} differs: {each}. Install the same version on all hosts.")
    return differences
