"""Runs a RunSpec on several hosts, with an agent on each. Ranks start once all hosts are ready."""

import os
from collections.abc import Collection, Sequence
from contextlib import closing
from functools import partial

from shardwise.errors import LaunchError
from shardwise.launch.console import Console
from shardwise.launch.part_runner import PartRunner
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents
from shardwise.launch.ssh.agents import Agents
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.supervisor import Supervisor
from shardwise.net import restarts
from shardwise.net.hosts import Share
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


class _Ranks:
    """The ranks of all hosts, of which some may be lost (`--survive`)."""

    def __init__(self, remotes: Sequence[RemoteHost]) -> None:
        self._remotes = remotes
        for remote in remotes:
            remote.relay = partial(self._relay, remote)

    def _relay(self, source: RemoteHost, generation: int, text: str) -> None:
        for remote in self._remotes:
            if remote is not source:
                remote.set_members(generation, text)

    def mark_lost(self, ranks: Sequence[int]) -> None:
        for remote in self._remotes:
            remote.mark_lost(ranks)

    def clear_away(self, rank: int) -> None:
        for remote in self._remotes:
            if rank in remote.share.every:
                remote.clear_away(rank)

    def start_spare(self, rank: int, *, grows: bool = False) -> None:
        raise LaunchError("Only a run on a single host can start further workers.")

    def has_joined(self, rank: int) -> bool:
        return any(rank in remote.joined for remote in self._remotes)

    def have_met(self, ranks: Collection[int]) -> bool:
        on = [each for each in self._remotes if not set(ranks).isdisjoint(each.share.numbers)]
        return all(remote.have_met for remote in on)


def survival_line(shares: Sequence[Share]) -> str:
    """Return the line that says which losses end a run with `--survive`."""
    words = (
        "shardwise: --survive: the run ends if this host is lost, because the launcher runs here."
    )
    largest = max(shares, key=lambda share: share.count)
    if 2 * largest.count > sum(share.count for share in shares):
        words += (
            f" With --zero 1 to 3, it also ends if {largest.host.name} is lost, which has more "
            "than half of the workers: second copies of their states are on the same host."
        )
    return f"{words}\n"


def _once(spec: RunSpec, console: Console, signals: Signals) -> Ending:
    """Start an agent on each host, then all ranks, and watch them until they exit."""
    supervisor = Supervisor(
        console,
        spec.outputs(console),
        signals,
        grace=spec.grace,
        joins=spec.joins,
        hosts=agents.names(spec.shares),
        survives=spec.survives,
        spares=spec.spares,
    )
    with closing(supervisor), Agents(spec, supervisor, console.lines, RemoteHost) as started:
        remotes = started.start(spec.shares)
        supervisor.substitutes = _Ranks(remotes)
        where = agents.prepare(spec, remotes, supervisor, listening=spec.shares[:1])
        if supervisor.is_asked:
            return supervisor.watch(())
        if spec.survives and len(remotes) > 1 and "quiet" not in spec.flags:
            supervisor.say(survival_line(spec.shares))
        # Start ranks only now that all hosts are ready. Otherwise they might wait for ranks on a
        # host that cannot start any.
        for remote in remotes:
            remote.start(where, spec.streams(console), supervisor)
        return supervisor.watch(remotes)
