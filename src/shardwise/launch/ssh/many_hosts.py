"""Runs a job on several hosts: an agent on each, and no rank starts before all are ready."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch import restarts
from shardwise.launch.console import Console
from shardwise.launch.hosts import LOOPBACK, Share
from shardwise.launch.job import Job
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.restarts import Ending
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import command, heartbeat
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.ssh.protocol import Message
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.supervisor import Supervisor

START_LIMIT = 60.0
"""Seconds that a host may take to log us in and answer."""


def run(job: Job, options: SshOptions) -> int:
    """Run `job` to its end and return the exit code. Raises LaunchError when it cannot start."""
    console = job.console(os.environ)
    with Signals() as signals:
        once = partial(_once, job, options, console, signals)
        return restarts.repeated(restarts.Restarts(job.restarts), once, console.say)


def _once(job: Job, options: SshOptions, console: Console, signals: Signals) -> Ending:
    """Reach all hosts, start all ranks, and watch them to their end, once."""
    with ExitStack() as stack:
        outputs = job.outputs(console)
        supervisor = Supervisor(
            console,
            outputs,
            signals,
            grace=job.grace,
            joins=job.joins,
            hosts=_names(job.shares),
        )
        stack.enter_context(closing(supervisor))
        remotes = stack.enter_context(_agents(job, options, supervisor, console.err.lines))
        where = _prepare(job, remotes, supervisor)
        if supervisor.is_asked:
            return supervisor.watch(())
        for remote in remotes:
            assert remote.ready is not None
            command = tuple(remote.ready["command"])
            task = job.task(remote.share, command, console, **where)
            remote.start(task, supervisor)
        return supervisor.watch(remotes)


@contextmanager
def _agents(
    job: Job, options: SshOptions, supervisor: Supervisor, say: Callable[[bytes], None]
) -> Iterator[list[RemoteHost]]:
    """Start an agent on each host; all are gone after the block."""
    with OrphanReaper() as reaper:
        remotes: list[RemoteHost] = []
        try:
            for share in job.shares:
                remotes.append(RemoteHost(options, share, say))
                reaper.started(remotes[-1].group)
                remotes[-1].connect(supervisor.selector)
            with heartbeat.heartbeats([remote.input_fd for remote in remotes]):
                yield remotes
        finally:
            for remote in remotes:
                remote.close()
            began = time.monotonic()
            for remote in remotes:
                remote.wait(began)
                if remote.is_gone():
                    reaper.ended(remote.group)


_NOWHERE: dict[str, Any] = {"address": LOOPBACK, "port": 0, "master_port": 0}


def _prepare(job: Job, remotes: Sequence[RemoteHost], supervisor: Supervisor) -> dict[str, Any]:
    """Wait until every host can start; returns rank 0's address, port and master_port.

    Raises LaunchError with all that is wrong on any of them.
    """
    _await(remotes, supervisor, lambda remote: remote.hello)
    if supervisor.is_asked:
        return _NOWHERE
    _refuse_twice(remotes)
    _compare(remotes, supervisor)
    known = [
        remote.hello["address"] if remote.hello and not remote.is_here else "" for remote in remotes
    ]
    for remote in remotes:
        remote.check(
            words=job.words,
            module=job.module,
            interface_name=job.interface,
            address=known[0],
            port=job.port,
            towards=next((address for address in known if address), LOOPBACK),
        )
    _await(remotes, supervisor, lambda remote: remote.ready)
    first = remotes[0].ready
    if first is None:
        return _NOWHERE
    return {name: first[name] for name in _NOWHERE}


def _await(
    remotes: Sequence[RemoteHost],
    supervisor: Supervisor,
    word: Callable[[RemoteHost], Message | None],
) -> None:
    """Wait until all have sent a message, or someone wants the run to end."""
    until = time.monotonic() + START_LIMIT
    while not supervisor.is_asked:
        silent = [remote for remote in remotes if word(remote) is None and remote.fault is None]
        left = until - time.monotonic()
        if not silent or left <= 0:
            break
        supervisor.turn(left)
    else:
        return
    faults = [remote.fault for remote in remotes if remote.fault is not None]
    faults += [
        f"{remote.share.host.name} has not answered in {START_LIMIT:g} s. "
        f"Does this work: ssh {remote.share.host.login} true"
        for remote in silent
    ]
    if faults:
        raise LaunchError(command.refusals(faults))


def _refuse_twice(remotes: Sequence[RemoteHost]) -> None:
    """Raise LaunchError where two names are one host: its local ranks would clash."""
    found: dict[str, Share] = {}
    for remote in remotes:
        machine, share = (remote.hello or {}).get("machine"), remote.share
        if machine in found:
            other = found[machine]
            raise LaunchError(
                f"{other.host.name} and {share.host.name} are the same host: name it once, with "
                f"all of its ranks ({other.host.name}:{other.count + share.count})."
            )
        if machine is not None:
            found[machine] = share


def _compare(remotes: Sequence[RemoteHost], supervisor: Supervisor) -> None:
    """Warn of hosts with another torch or Python than the first."""
    first, *others = remotes
    for remote in others:
        for what in ("torch", "python"):
            assert first.hello is not None
            assert remote.hello is not None
            here, there = first.hello[what], remote.hello[what]
            if here != there:
                supervisor.say(
                    f"shardwise: {remote.share.host.name} has {what} {there}, "
                    f"{first.share.host.name} {here}: results may differ.\n"
                )


def _names(shares: Sequence[Share]) -> dict[int, str]:
    """By rank, the name of its host."""
    return {
        rank: share.host.name
        for share in shares
        for rank in range(share.first, share.first + share.count)
    }
