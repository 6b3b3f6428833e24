"""Starts an agent on each host of a run, and waits until all are ready."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

from shardwise.errors import LaunchError
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.ssh import command, heartbeat
from shardwise.launch.ssh.protocol import Message
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.supervisor import Supervisor
from shardwise.net.hosts import LOOPBACK, Host, Share

START_LIMIT = 60.0
"""Maximum number of seconds until ssh has logged in to a host and its agent has answered."""


H = TypeVar("H", bound=RemoteHost)


class Agents(Generic[H]):
    """Context manager for the agents of a run. Stops them on exit.

    Args:
        spec: The run.
        supervisor: The launcher's event loop.
        say: Prints lines of output from the hosts.
        kind: Class of the connection to a host.
    """

    def __init__(
        self,
        spec: RunSpec,
        supervisor: Supervisor,
        say: Callable[[bytes], None],
        kind: type[H],
    ) -> None:
        self._spec, self._supervisor, self._say = spec, supervisor, say
        self._kind = kind
        self._remotes: list[H] = []
        self._beats: dict[H, ExitStack] = {}
        """The heartbeat process for each agent. Agents that were started together share one."""
        self._is_here: dict[Host, bool] = {}
        """Whether each host is this one. A cache, because resolving a name may be slow."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # The stack closes in reverse order, so `_end` asks the agents to exit before the reaper
        # kills ssh.
        self._reaper = self._stack.enter_context(OrphanReaper())
        self._stack.callback(self._end)
        self._supervisor.every_turn.append(self._give_up_silent_hosts)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, shares: Iterable[Share]) -> list[H]:
        """Start an agent on each share's host. Raises LaunchError if ssh cannot be started."""
        remotes = [self._start_one(share) for share in shares]
        beats = ExitStack()
        self._beats |= dict.fromkeys(remotes, beats)
        beats.enter_context(heartbeat.heartbeats([remote.input_fd for remote in remotes]))
        return remotes

    def _start_one(self, share: Share) -> H:
        known = self._is_here.get(share.host)
        remote = self._kind(self._spec, share, self._say, is_here=known)
        self._is_here[share.host] = remote.is_here
        self._remotes.append(remote)
        self._reaper.started(remote.group)
        remote.connect(self._supervisor.selector)
        return remote

    def _give_up_silent_hosts(self) -> float | None:
        """Declare hosts lost if their agents have been silent for too long.

        Returns the seconds until the next check, or None if no host needs to be checked again.
        """
        waits = [wait for remote in self._remotes if (wait := remote.look()) is not None]
        return min(waits, default=None)

    def forget(self, remote: H, since: float) -> None:
        """Remove an agent that was asked to exit at time `since`, and wait until it exits."""
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
        # All agents have been asked to exit before the first wait, so many slow hosts take no
        # longer than one.
        began = time.monotonic()
        for remote in self._remotes:
            self._wait(remote, began)

    def _wait(self, remote: H, since: float) -> None:
        remote.wait(since)
        if remote.is_gone():
            self._reaper.ended(remote.group)


_NOWHERE = Meeting(address=LOOPBACK, port=0, master_port=0)


def prepare(
    spec: RunSpec,
    remotes: Sequence[RemoteHost],
    supervisor: Supervisor,
    listening: Collection[Share],
) -> Meeting:
    """Wait until every host is ready to start its ranks.

    Args:
        spec: The run.
        remotes: The hosts.
        supervisor: The launcher's event loop.
        listening: Shares whose hosts must listen for connections from ranks.

    Returns:
        Address and ports on the first host.

    Raises:
        LaunchError: Some hosts are not ready. The message lists all reasons.
    """
    # This takes two rounds, because checking a host requires the addresses of the other hosts.
    wait_for(remotes, supervisor, lambda remote: remote.hello)
    if supervisor.is_asked:
        return _NOWHERE
    _refuse_duplicates(remotes)
    _compare_versions(remotes, supervisor)
    for remote in remotes:
        check(remote, remotes, listens=remote.share in listening)
    wait_for(remotes, supervisor, lambda remote: remote.ready)
    first = remotes[0].ready
    if first is None:
        return _NOWHERE
    return Meeting(address=first["address"], port=first["port"], master_port=first["master_port"])


def address(remote: RemoteHost) -> str:
    """Return the address at which ssh reached the host, as its agent reports it.

    Returns "" for this host, or if the address is unknown.
    """
    return remote.hello["address"] if remote.hello and not remote.is_here else ""


def peer(remote: RemoteHost, remotes: Iterable[RemoteHost]) -> str:
    """Return the address of a host other than `remote`, or its name if no address is known.

    Returns the loopback address if there is no other host.
    """
    # The route from `remote` to this other host uses the network that the hosts share.
    others = [other for other in remotes if other is not remote]
    # An agent learns its address from SSH_CONNECTION, which other programs for --ssh do not set.
    reached = [found for other in others if (found := address(other))]
    named = [other.share.host.name for other in others if not other.is_here]
    ours = [socket.gethostname() for other in others if other.is_here]
    return next(iter([*reached, *named, *ours]), LOOPBACK)


def check(remote: RemoteHost, remotes: Iterable[RemoteHost], *, listens: bool) -> None:
    """Ask a host whether it can start its ranks. If `listens` is true, the host also listens."""
    # It listens at the address that ssh used. If that is unknown, it listens at the address that it
    # uses on the route to another host.
    remote.check(listens=listens, address=address(remote), towards=peer(remote, remotes))


def wait_for(
    remotes: Sequence[H],
    supervisor: Supervisor,
    word: Callable[[H], Message | bool | None],
) -> None:
    """Wait until every host has sent a particular message, or until the user stops the run.

    Raises LaunchError if a host fails or does not answer in time.

    Args:
        remotes: The hosts.
        supervisor: The launcher's event loop.
        word: Returns a true value once the host has sent the message.
    """
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
        f"{remote.share.host.name} has not answered within {START_LIMIT:g} s. {remote.advice}"
        for remote in silent
    ]
    if faults:
        raise LaunchError(command.refusals(faults))


def _refuse_duplicates(remotes: Sequence[RemoteHost]) -> None:
    """Raise LaunchError if two names refer to the same host."""
    # Otherwise both agents would number their local ranks from 0, and use the same GPUs.
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


def _compare_versions(remotes: Sequence[RemoteHost], supervisor: Supervisor) -> None:
    """Warn about hosts whose version of torch or Python differs from the first host's."""
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
    """Return each rank's host name."""
    return {rank: share.host.name for share in shares for rank in share.every}
