"""Runs elastic islands on this host. The ranks of each island start and connect separately."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

from shardwise.config import values
from shardwise.errors import LaunchError
from shardwise.islands.elastic import hosts
from shardwise.islands.elastic.broker import HostBroker
from shardwise.islands.elastic.membership import DELAYS
from shardwise.islands.elastic.supervisor import IslandSupervisor
from shardwise.islands.elastic.workers import IslandWorkers, allow_files
from shardwise.launch.console import Console
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.worker import Begin
from shardwise.net import network
from shardwise.net.hosts import LOOPBACK
from shardwise.net.restarts import Ending, Restarts

MOST = 253
"""Maximum number of file descriptors that Linux passes in a single message (SCM_MAX_FD)."""


def once(
    spec: RunSpec, begin: Begin, console: Console, signals: Signals, restarts: Restarts
) -> Ending:
    """Start all islands, and watch them until the run ends.

    `restarts` counts and limits the islands' restarts.
    """
    allow_files(spec.size, spec.parts)
    address = LOOPBACK if spec.interface is None else network.address_of_interface(spec.interface)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    size = spec.size // spec.parts
    with OrphanReaper(folder) as reaper, network.reserve_port(address) as spare:
        supervisor = IslandSupervisor(
            console,
            spec.outputs(console),
            signals,
            grace=spec.grace,
            joins=spec.joins,
            count=spec.parts,
            size=size,
            restarts=restarts,
        )
        sinks = supervisor.hear, supervisor.left, supervisor.saves_first
        broker = HostBroker(supervisor.selector, supervisor.exchanges)
        supervisor.exchanges.attach(broker, range(spec.size))
        numbers = count()

        def link(rank: int) -> socket.socket:
            supervisor.exchanges.link([rank])
            return broker.open(rank)

        def start(island: int, returns: bool) -> IslandWorkers:
            # Use a new folder for each start, so that an island does not read its predecessor's
            # reports.
            start_folder = folder / f"start-{next(numbers)}"
            start_folder.mkdir(mode=0o700)
            with network.listen(address, 0) as listener:
                workers = IslandWorkers(
                    spec,
                    Meeting(
                        address=address,
                        port=listener.getsockname()[1],
                        master_port=spare.getsockname()[1],
                    ),
                    spec.streams(console, reads=True),
                    begin,
                    start_folder,
                    reaper,
                    supervisor.selector,
                    *sinks,
                    island=island,
                    count=spec.parts,
                    link=link,
                    returns=returns,
                )
                try:
                    workers.start(listener)
                except BaseException:  # started ranks would wait for the others
                    workers.give_up()
                    raise
            return workers

        with closing(supervisor), closing(broker):
            ending = supervisor.watch_islands(start)
        for workers in [*supervisor.ended, *supervisor.islands]:
            workers.release()
        return ending


def checked(counts: Sequence[int], settings: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return the number of elastic islands, and `settings` updated with this number.

    `counts` holds the number of ranks on each host. Raises LaunchError if elastic islands are not
    possible with these arguments.
    """
    if not sys.platform.startswith("linux"):
        raise LaunchError("--elastic-islands works only on Linux. Remove this flag.")
    islands, size = _count(counts, settings.get("islands", "1")), sum(counts)
    if islands > MOST:
        raise LaunchError(
            f"--elastic-islands with --islands {islands}: at most {MOST} islands are possible, "
            "because each exchange sends one file per island in a single message, and Linux "
            "limits their number."
        )
    if size % islands:
        fits = [str(each) for each in range(2, size + 1) if size % each == 0]
        raise LaunchError(
            f"--islands {islands} does not divide {size} workers, but all islands have the same "
            f"size. Write --islands with one of {', '.join(fits)}."
        )
    for name, is_off in (("behind", ""), ("late", "0")):
        value = settings.get(name, is_off)
        if value != is_off:
            raise LaunchError(DELAYS.format(flag=f"--{name} {value}"))
    return islands, {**settings, "islands": str(islands)}


def _count(counts: Sequence[int], text: str) -> int:
    """Parse `text`, the value of `--islands`. Raises LaunchError if it is invalid."""
    if text == "host" and len(counts) > 1:
        if len(set(counts)) > 1:
            raise LaunchError(
                f"--islands host needs the same number of workers on every host, but these have "
                f"{', '.join(map(str, counts))}. Use equal numbers (-H a:4,b:4), or write "
                "--islands with a number."
            )
        return len(counts)
    try:
        return values.whole(2)(text)
    except ValueError:
        raise LaunchError(
            f"--elastic-islands with --islands {text}: write the number of islands, 2 or more, "
            "such as --islands 2; or host, for one island per host (-H, --hostfile)."
        ) from None


class _Runner:
    """Runs jobs with elastic islands for the launcher.

    Implements `launch.part_runner.PartRunner`.
    """

    checked = staticmethod(checked)
    on_one_host = staticmethod(once)
    on_many_hosts = staticmethod(hosts.once)


RUNNER = _Runner()
