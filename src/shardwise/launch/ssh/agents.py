"""Starts an agent on each host of a run, and waits until all are ready."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.job import Job
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.ssh import command, heartbeat
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.ssh.protocol import Message
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.supervisor import Supervisor
from shardwise.net.hosts import LOOPBACK, Host, Share

START_LIMIT = 60.0
"""Seconds that a host may take to log us in and answer."""


class Agents:
    """The agents of a run; a context, after which all are gone. `say` shows lines of theirs."""

    def __init__(
        self, options: SshOptions, supervisor: Supervisor, say: Callable[[bytes], None]
    ) -> None:
        self._options, self._supervisor, self._say = options, supervisor, say
        self._remotes: list[RemoteHost] = []
        self._beats: dict[RemoteHost, ExitStack] = {}
        """What tells each that we are alive; one for all that were started together."""
        self._is_here: dict[Host, bool] = {}
        """What was found out before, since a name may take long to look up."""
        self._stack = ExitStack()

    def __enter__(self) -> Agents:
        self._reaper = self._stack.enter_context(OrphanReaper())
        self._stack.callback(self._end)
        self._supervisor.every_turn.append(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, shares: Iterable[Share]) -> list[RemoteHost]:
        """Start an agent on the host of each of `shares`. Raises LaunchError without an ssh."""
        made = [self._started(share) for share in shares]
        beats = ExitStack()
        self._beats |= dict.fromkeys(made, beats)
        beats.enter_context(heartbeat.heartbeats([remote.input_fd for remote in made]))
        return made

    def _started(self, share: Share) -> RemoteHost:
        known = self._is_here.get(share.host)
        remote = RemoteHost(self._options, share, self._say, is_here=known)
        self._is_here[share.host] = remote.is_here
        self._remotes.append(remote)
        self._reaper.started(remote.group)
        remote.connect(self._supervisor.selector)
        return remote

    def _look(self) -> float | None:
        """Give up the hosts whose agents are silent; seconds until one of the others may be."""
        waits = [wait for remote in self._remotes if (wait := remote.look()) is not None]
        return min(waits, default=None)

    def forget(self, remote: RemoteHost, since: float) -> None:
        """Wait for the end of an agent that was asked for it at `since`, and forget it, once."""
        if remote in self._remotes:
            self._remotes.remove(remote)
            remote.disconnect()
            beats = self._beats.pop(remote, None)
            if beats is not None and beats not in self._beats.values():
                beats.close()
            self._wait(remote, since)

    def _end(self) -> None:
        for beats in self._beats.values():
            beats.close()
        for remote in self._remotes:
            remote.close()
        began = time.monotonic()
        for remote in self._remotes:
            self._wait(remote, began)

    def _wait(self, remote: RemoteHost, since: float) -> None:
        remote.wait(since)
        if remote.is_gone():
            self._reaper.ended(remote.group)


_NOWHERE: dict[str, Any] = {"address": LOOPBACK, "port": 0, "master_port": 0}


def prepare(
    job: Job, remotes: Sequence[RemoteHost], supervisor: Supervisor, listening: Collection[Share]
) -> dict[str, Any]:
    """Wait until every host can start; the hosts of the shares `listening` listen on the job's
    port. Returns rank 0's address, port and master_port.

    Raises LaunchError with all that is wrong on any of them.
    """
    wait_for(remotes, supervisor, lambda remote: remote.hello)
    if supervisor.is_asked:
        return _NOWHERE
    _refuse_twice(remotes)
    _compare(remotes, supervisor)
    for remote in remotes:
        check(job, remote, remotes, listens=remote.share in listening)
    wait_for(remotes, supervisor, lambda remote: remote.ready)
    first = remotes[0].ready
    if first is None:
        return _NOWHERE
    return {name: first[name] for name in _NOWHERE}


def address(remote: RemoteHost) -> str:
    """Where a host was reached, as it says; "" for this one."""
    return remote.hello["address"] if remote.hello and not remote.is_here else ""


def peer(remote: RemoteHost, remotes: Iterable[RemoteHost]) -> str:
    """Return the address of another host than `remote`, or its name if no address is known.

    The route to it leads over the network that the hosts share. Returns the loopback address if
    `remote` is the only host.
    """
    others = [other for other in remotes if other is not remote]
    # ssh sets SSH_CONNECTION, so the agent knows its own address. Other programs for --ssh do not.
    reached = [found for other in others if (found := address(other))]
    named = [other.share.host.name for other in others if not other.is_here]
    ours = [socket.gethostname() for other in others if other.is_here]
    return next(iter([*reached, *named, *ours]), LOOPBACK)


def check(job: Job, remote: RemoteHost, remotes: Iterable[RemoteHost], *, listens: bool) -> None:
    """Ask a host whether it can start. It listens at the address by which it was reached. If that
    is not known, it listens at its address on the route to another one of `remotes`."""
    remote.check(
        words=job.words,
        module=job.module,
        interface_name=job.interface,
        listens=listens,
        address=address(remote),
        port=job.port,
        towards=peer(remote, remotes),
    )


def wait_for(
    remotes: Sequence[RemoteHost],
    supervisor: Supervisor,
    word: Callable[[RemoteHost], Message | bool | None],
) -> None:
    """Wait until all have sent a message, or someone wants the run to end. Raises LaunchError."""
    until = time.monotonic() + START_LIMIT
    while not supervisor.is_asked:
        silent = [remote for remote in remotes if not word(remote) and remote.fault is None]
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


def names(shares: Sequence[Share]) -> dict[int, str]:
    """By rank, the name of its host."""
    return {rank: share.host.name for share in shares for rank in share.numbers}
