"""Runs one rank of `shardwise doctor`: `python -m shardwise.tools.doctor` under any launcher."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from shardwise.errors import ConfigError, LaunchError
from shardwise.messages.printable import many, printable
from shardwise.net.launchers import detection as launcher_detection
from shardwise.tools.doctor import checks, findings, network
from shardwise.tools.doctor.checks import Check
from shardwise.tools.doctor.network import Speed
from shardwise.world.initialize import enter
from shardwise.world.world import World


def main() -> int:
    """Check this host and the network together with the other ranks. Rank 0 prints the results.

    Returns the exit code, which is 1 on rank 0 if a run would fail.
    """
    try:
        world = enter(0, {}, network.connect_all)
    except network.Unreachable as error:
        return _say_what_is_wrong(error.lines)
    except ConfigError as error:  # all ranks have the same settings, so print the error once
        return _say_what_is_wrong([str(error)])
    except LaunchError as error:  # may affect this rank only, so this rank prints it
        print(printable(f"wrong: {error}"), flush=True)
        return 1
    hosts = _hosts(world)
    measured = _measured(world)
    faults = findings.faults(hosts)
    if world.is_main:
        _print(world, hosts, measured, faults)
    # Only rank 0 fails, because the launcher prints a message for each failed rank.
    return 1 if faults and world.is_main else 0


def _say_what_is_wrong(lines: list[str]) -> int:
    """Print on rank 0 why the ranks cannot join. Return the exit code."""
    is_main = launcher_detection.identify().rank == 0
    for line in lines if is_main else ():
        print(printable(f"wrong: {line}"), flush=True)
    return int(is_main)


def _hosts(world: World) -> dict[str, list[Check]]:
    """Return each host's check results, from the first rank on that host. Collective."""
    mine = checks.of_host(world.settings)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by Gloo")
    mine.append(Check("network interface", interface))
    mine += network.check(launcher_detection.identify())
    # Compare the clock with rank 0's, over the connection that hang reports use.
    ahead = world.collectives.status_server.clock_offset(0, "wall")
    mine.append(findings.clock(None if ahead is None else ahead.ns / 1e9))
    hosts: dict[str, list[Check]] = {}
    for host, host_checks in world.gather((world.host, mine)):
        # Results are in rank order, so this keeps the results of each host's first rank.
        hosts.setdefault(host, host_checks)
    return hosts


def _measured(world: World) -> dict[str, Speed]:
    """Measure all-reduce over all ranks, and within each host if there are several. Collective."""
    if world.size == 1:
        return {}
    group = world.collectives
    speeds = {
        f"of {world.size} ranks over {group.name}": network.measure_speed(group, world.device)
    }
    names = world.gather(world.host)
    members = [[rank for rank, name in enumerate(names) if name == host] for host in set(names)]
    # `split` is a collective, so all hosts must take part. Skip it if any host has only one rank.
    if len(members) > 1 and min(map(len, members)) > 1:
        inside = group.split(sorted(members))
        speeds[f"inside {world.host}"] = network.measure_speed(inside, world.device)
    return speeds


def _print(
    world: World, hosts: dict[str, list[Check]], measured: dict[str, Speed], faults: list[str]
) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(
        f"{many(world.size, 'rank')} on {many(len(hosts), 'host')}, started by {world.launcher}"
    )
    console.print(findings.table(hosts))
    for line in findings.speeds(measured):
        console.print(printable(line))
    for line in findings.advice(hosts):
        console.print(printable(f"mind: {line}"), soft_wrap=True)
    for line in faults:
        console.print(printable(f"wrong: {line}"), soft_wrap=True)
    if not faults:
        console.print("Found nothing that would make a run fail.")


if __name__ == "__main__":
    sys.exit(main())
