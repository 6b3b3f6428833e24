"""Runs a RunSpec on several hosts, with an agent on each. Ranks start once all hosts are ready."""

import os
from contextlib import closing
from functools import partial

from shardwise.launch.console import Console
from shardwise.launch.part_runner import PartRunner
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents
from shardwise.launch.ssh.agents import Agents
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.supervisor import Supervisor
from shardwise.net import restarts
from shardwise.net.restarts import Ending


def run(spec: RunSpec, part_runner: PartRunner | None) -> int:
    """Run `spec` until it finishes, and return the exit code.

    Raises LaunchError if the ranks cannot be started.
    """
    console = spec.console(os.environ)
    with Signals() as signals:
        allowed = restarts.Restarts(spec.restarts)
        once = partial(_once, spec, console, signals)
        if part_runner is not None:
            once = partial(part_runner.on_many_hosts, spec, console, signals, allowed)
        return restarts.repeated(allowed, once, console.say)


def _once(spec: RunSpec, console: Console, signals: Signals) -> Ending:
    """Start an agent on each host, then all ranks, and watch them until they exit."""
    supervisor = Supervisor(
        console,
        spec.outputs(console),
        signals,
        grace=spec.grace,
        joins=spec.joins,
        hosts=agents.names(spec.shares),
    )
    with closing(supervisor), Agents(spec, supervisor, console.lines, RemoteHost) as started:
        remotes = started.start(spec.shares)
        where = agents.prepare(spec, remotes, supervisor, listening=spec.shares[:1])
        if supervisor.is_asked:
            return supervisor.watch(())
        # Start ranks only now that all hosts are ready. Otherwise they might wait for ranks on a
        # host that cannot start any.
        for remote in remotes:
            remote.start(where, spec.streams(console), supervisor)
        return supervisor.watch(remotes)
