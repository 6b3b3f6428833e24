"""Runs a job of elastic islands on this host: each is started, and meets, by itself."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

from shardwise.config import BESIDE_ELASTIC, values
from shardwise.errors import LaunchError
from shardwise.launch.console import Console
from shardwise.launch.island_supervisor import IslandSupervisor
from shardwise.launch.island_workers import IslandWorkers, allow_files
from shardwise.launch.job import Job
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.signals import Signals
from shardwise.net import network
from shardwise.net.hosts import LOOPBACK
from shardwise.net.island_desk import IslandDesk
from shardwise.net.restarts import Ending, Restarts

MOST = 253
"""So many files Linux passes on in one message (SCM_MAX_FD)."""


def once(
    job: Job, command: tuple[str, ...], console: Console, signals: Signals, restarts: Restarts
) -> Ending:
    """Start all islands, and watch them to the end of the run; islands that are started again count
    among `restarts`."""
    allow_files(job.size, job.elastic_islands)
    address = LOOPBACK if job.interface is None else network.address_of_interface(job.interface)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    size = job.size // job.elastic_islands
    with OrphanReaper(folder) as reaper, network.reserve_port(address) as spare:
        supervisor = IslandSupervisor(
            console,
            job.outputs(console),
            signals,
            grace=job.grace,
            joins=job.joins,
            count=job.elastic_islands,
            size=size,
            restarts=restarts,
        )
        sinks = supervisor.hear, supervisor.left, supervisor.saves_first
        desk = IslandDesk(supervisor.selector, supervisor.hub)
        supervisor.hub.attach(desk, range(job.size))
        numbers = count()

        def link(rank: int) -> socket.socket:
            supervisor.hub.link([rank])
            return desk.open(rank)

        def start(island: int, returns: bool) -> IslandWorkers:
            own = folder / f"start-{next(numbers)}"
            own.mkdir(mode=0o700)
            with network.listen(address, 0) as meeting:
                where = {"port": meeting.getsockname()[1], "master_port": spare.getsockname()[1]}
                task = job.task(
                    job.shares[0], command, console, address=address, **where, reads=True
                )
                workers = IslandWorkers(
                    task,
                    own,
                    reaper,
                    supervisor.selector,
                    *sinks,
                    island=island,
                    count=job.elastic_islands,
                    link=link,
                    returns=returns,
                )
                try:
                    workers.start(meeting)
                except BaseException:  # not all of its ranks run, which would wait for each other
                    workers.give_up()
                    raise
            return workers

        with closing(supervisor), closing(desk):
            ending = supervisor.watch_islands(start)
        for workers in [*supervisor.ended, *supervisor.islands]:
            workers.release()
        return ending


def checked(counts: Sequence[int], settings: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """How many islands, of which each may end and come back, a run has that has so many ranks on
    each of its hosts, and its `settings` with that number. Raises LaunchError where that cannot
    be."""
    if not sys.platform.startswith("linux"):
        raise LaunchError("--elastic-islands needs Linux: leave it out.")
    islands, size = _count(counts, settings.get("islands", "1")), sum(counts)
    if islands > MOST:
        raise LaunchError(
            f"--elastic-islands with --islands {islands}: no more than {MOST} islands, of which an "
            "exchange passes on a file each, since Linux takes no more at once."
        )
    if size % islands:
        raise LaunchError(
            f"--islands {islands} does not divide {size} workers: islands are of one size. Write "
            f"--islands with one of {', '.join(_divisors(size))}."
        )
    for name, is_off in (("behind", ""), ("late", "0")):
        value = settings.get(name, is_off)
        if value != is_off:
            raise LaunchError(BESIDE_ELASTIC.format(given=f"--{name} {value}"))
    return islands, {**settings, "islands": str(islands)}


def _divisors(size: int) -> list[str]:
    """The numbers of islands that so many workers can make."""
    return [str(each) for each in range(2, size + 1) if size % each == 0]


def _count(counts: Sequence[int], text: str) -> int:
    """The number of islands that `--islands TEXT` means. Raises LaunchError for what is none."""
    if text == "host" and len(counts) > 1:
        if len(set(counts)) > 1:
            raise LaunchError(
                f"--islands host needs as many workers on every host; these have "
                f"{', '.join(map(str, counts))}. Start equal numbers (-H a:4,b:4), or write "
                "--islands with a number."
            )
        return len(counts)
    try:
        return values.whole(2)(text)
    except ValueError:
        raise LaunchError(
            f"--elastic-islands with --islands {text}: say how many islands there are, 2 or more, "
            "such as --islands 2; or host, for one on each of several hosts (-H, --hostfile)."
        ) from None
