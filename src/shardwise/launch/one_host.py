"""Runs a job on this host alone: its ranks meet on loopback, rank 0 reads our input."""

import os
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from shardwise.launch import island_run, program
from shardwise.launch.console import Console
from shardwise.launch.job import Job
from shardwise.launch.local_workers import LocalWorkers
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.signals import Signals
from shardwise.launch.supervisor import Supervisor
from shardwise.launch.worker import Begin
from shardwise.net import network, private_files, restarts
from shardwise.net.hosts import LOOPBACK
from shardwise.net.restarts import Ending


def run(job: Job) -> int:
    """Run `job` to its end and return the exit code. Raises LaunchError when it cannot start."""
    command = program.command(job.words[0], job.words[1:], module=job.module)
    console = job.console(os.environ)
    ending = _ending(job, console, command)
    console.say(ending.words)
    return ending.code


def run_begun(job: Job, console: Console, begin: Begin) -> Ending:
    """Run `job` to its end with ranks that `begin` starts, and return how it ended.

    Raises LaunchError when it cannot start.
    """
    return _ending(job, console, (), begin)


def _ending(
    job: Job, console: Console, command: tuple[str, ...], begin: Begin | None = None
) -> Ending:
    with Signals() as signals:
        allowed = restarts.Restarts(job.restarts)
        once = partial(_once, job, command, console, signals, begin)
        if job.elastic_islands:
            once = partial(island_run.once, job, command, console, signals, allowed)
        try:
            return restarts.last_ending(allowed, once, console.say)
        finally:
            (private_files.folder_path() / private_files.commit_file(job.run)).unlink(
                missing_ok=True
            )
            private_files.tidy()


def _once(
    job: Job,
    command: tuple[str, ...],
    console: Console,
    signals: Signals,
    begin: Begin | None,
) -> Ending:
    """Start all ranks, and watch them to their end."""
    address = LOOPBACK if job.interface is None else network.address_of_interface(job.interface)
    with network.listen(address, job.port) as meeting, network.reserve_port(address) as spare:
        where = {"port": meeting.getsockname()[1], "master_port": spare.getsockname()[1]}
        task = job.task(job.shares[0], command, console, address=address, **where, reads=True)
        outputs = job.outputs(console)
        folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
        with OrphanReaper(folder) as reaper:
            supervisor = Supervisor(console, outputs, signals, grace=job.grace, joins=job.joins)
            sinks = supervisor.hear, supervisor.left, supervisor.saves_first
            workers = LocalWorkers(task, folder, reaper, supervisor.selector, *sinks, begin)
            with closing(supervisor):
                workers.start(meeting)
                meeting.close()
                ending = supervisor.watch([workers])
            workers.release()
            return ending
