"""Runs a job on several hosts: an agent on each, and no rank starts before all are ready."""

import os
from contextlib import closing
from functools import partial

from shardwise.launch.console import Console
from shardwise.launch.job import Job
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents, island_hosts
from shardwise.launch.ssh.agents import Agents
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.supervisor import Supervisor
from shardwise.net import restarts
from shardwise.net.restarts import Ending


def run(job: Job, options: SshOptions) -> int:
    """Run `job` to its end and return the exit code. Raises LaunchError when it cannot start."""
    console = job.console(os.environ)
    with Signals() as signals:
        allowed = restarts.Restarts(job.restarts)
        once = partial(_once, job, options, console, signals)
        if job.elastic_islands:
            once = partial(island_hosts.once, job, options, console, signals, allowed)
        return restarts.repeated(allowed, once, console.say)


def _once(job: Job, options: SshOptions, console: Console, signals: Signals) -> Ending:
    """Reach all hosts, start all ranks, and watch them to their end, once."""
    outputs = job.outputs(console)
    supervisor = Supervisor(
        console,
        outputs,
        signals,
        grace=job.grace,
        joins=job.joins,
        hosts=agents.names(job.shares),
    )
    with closing(supervisor), Agents(options, supervisor, console.err.lines) as started:
        remotes = started.start(job.shares)
        where = agents.prepare(job, remotes, supervisor, listening=job.shares[:1])
        if supervisor.is_asked:
            return supervisor.watch(())
        for remote in remotes:
            assert remote.ready is not None
            command = tuple(remote.ready["command"])
            remote.start(job.task(remote.share, command, console, **where), supervisor)
        return supervisor.watch(remotes)
