"""The launcher's representation of remote hosts, brokers and islands."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.islands.elastic import transfers
from shardwise.islands.elastic.agent import FROM_ISLANDS, OF_A_RANK
from shardwise.islands.elastic.broker import Contribution, Delivery, Key
from shardwise.islands.elastic.exchanges import Exchanges
from shardwise.islands.elastic.membership import ranks_here
from shardwise.islands.elastic.supervisor import IslandSupervisor
from shardwise.launch.run_spec import Meeting
from shardwise.launch.ssh import protocol
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.launch.worker import WorkerStreams
from shardwise.net.hosts import Share


class RemoteBroker:
    """Represents the broker on another host, which runs in that host's agent.

    Args:
        send: Sends a message to the agent.
        exchanges: Receives the ranks' messages.
        place: The address of the host's file server.
        failed: Called as `failed(broker, key, reason)` if the host could not fetch a file.

    Attributes:
        serving: True once the agent's broker is running.
        meetings: The ports of each island whose rendezvous is on the host.
        reached: The other hosts that the host could fetch from, by their first ranks.
        unreached: The reasons why the host could not fetch from others, by their first ranks.
        unstarted: The reason why an island could not start on the host, by island.
    """

    def __init__(
        self,
        send: Callable[..., None],
        exchanges: Exchanges,
        place: transfers.Address,
        failed: Callable[[RemoteBroker, Key, str], None],
    ) -> None:
        self.place = place
        self.serving = False
        self.meetings: dict[int, Mapping[str, int]] = {}
        self.reached: set[int] = set()
        self.unreached: dict[int, str] = {}
        self.unstarted: dict[int, str] = {}
        self.stalls: dict[Key, float] = {}
        """For each file that the host is fetching, the time of the first failed attempt.

        The time is infinity while no attempt has failed.
        """
        self._send, self._exchanges, self._failed = send, exchanges, failed

    # -- messages to the agent --------------------------------------------------------------

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Deliver messages and files to ranks, then delete the files in `dropped`."""
        for key in dropped:
            self.stalls.pop(key, None)
        self._send(
            "settle",
            deliveries=[asdict(each) for each in deliveries],
            dropped=[list(key) for key in dropped],
        )

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`."""
        self._send("shut", ranks=list(ranks))

    def forget_reached(self, rank: int) -> None:
        """Discard the result of the last test fetch from the host whose first rank is `rank`."""
        self.reached.discard(rank)
        self.unreached.pop(rank, None)

    def keep(self, key: Key, data: str) -> None:
        """Store the base64-encoded `data` as the file `key` on the remote host."""
        self._send("keep", rank=key[0], number=key[1], data=data)

    def fetch(self, key: Key, source: RemoteBroker) -> None:
        """Tell the remote host to fetch the file `key` from the host of the broker `source`."""
        if key[1] != transfers.NOTHING:
            self.stalls[key] = math.inf
        address, port = source.place
        self._send("fetch", rank=key[0], number=key[1], address=address, port=port)

    # -- messages of the agent ------------------------------------------------------------

    def hear(self, message: protocol.Message) -> None:
        """Handle a message from the agent."""
        values = {name: value for name, value in message.items() if name != "kind"}
        getattr(self, f"_on_{message['kind']}")(**values)

    def _on_serving(self) -> None:
        self.serving = True

    def _on_listening(self, island: int, **ports: int) -> None:
        self.meetings[island] = ports

    def _on_unstarted(self, island: int, why: str) -> None:
        self.unstarted[island] = why

    def _on_contribution(self, data: str | None, **values: Any) -> None:
        self._exchanges.contribute(Contribution(**values), data)

    def _on_back(self, rank: int) -> None:
        self._exchanges.request_return(rank)

    def _on_who(self, rank: int) -> None:
        self._exchanges.report_missing(rank)

    def _on_fetched(self, rank: int, number: int) -> None:
        if number == transfers.NOTHING:
            self.reached.add(rank)
        else:
            self.stalls.pop((rank, number), None)
            self._exchanges.mark_fetched(self, (rank, number))

    def _on_unfetched(self, rank: int, number: int, why: str) -> None:
        if number == transfers.NOTHING:
            self.unreached[rank] = why
        elif (key := (rank, number)) in self.stalls:  # otherwise the file was dropped
            self.stalls[key] = min(self.stalls[key], time.monotonic())
            self._failed(self, key, why)

    def cannot_fetch(self, ranks: range) -> bool:
        """Return whether the remote host is currently unable to fetch a file from `ranks`."""
        return any(rank in ranks and since < math.inf for (rank, _), since in self.stalls.items())


class IslandRemoteHost(RemoteHost):
    """The launcher's connection to an agent that runs elastic islands."""

    kinds: protocol.Kinds = {**protocol.FROM_AGENT, **FROM_ISLANDS}  # noqa: RUF012
    broker: RemoteBroker | None = None
    """The broker of the host, once it was asked to serve."""

    def serve(self, broker: RemoteBroker, supervisor: IslandSupervisor, **values: Any) -> None:
        """Start the remote host's broker, which is represented by `broker`.

        `supervisor` handles the ranks' messages. `values` are the arguments of
        `IslandAgent.on_serve`.
        """
        self.broker, self._supervisor = broker, supervisor
        # Ranks count as exited until their island starts.
        self._left.update(self.share.numbers)
        self.send("serve", **values)

    def start_island(
        self, meeting: Meeting, streams: WorkerStreams, ranks: Collection[int], **about: Any
    ) -> None:
        """Start an island's ranks on the remote host.

        `about` holds further arguments of `IslandAgent.on_start_island`.
        """
        self._left.difference_update(ranks)
        self.send("start_island", meeting=asdict(meeting), streams=asdict(streams), **about)

    def _take(self, message: protocol.Message) -> None:
        kind = message["kind"]
        # Islands of a lost host may have restarted. Messages from its old agent about ranks would
        # refer to the earlier processes.
        if self.broker is not None and self.fault is not None and kind != "output":
            return
        if kind not in FROM_ISLANDS:
            super()._take(message)
            return
        self._started(message["rank"] if kind in OF_A_RANK else None)
        if self.broker is None:
            raise protocol.ProtocolError("a message about islands, but this run is not elastic")
        self.broker.hear(message)


class IslandHost:
    """A host and its agent, which is replaced if the host is lost.

    `share` names the host and its ranks. `is_up` is True if islands can start there.
    """

    def __init__(self, share: Share, remote: IslandRemoteHost) -> None:
        self.share = share
        self.remote = remote
        self.is_up = False
        self.recovery: Iterator[None] | None = None
        """The operation that recovers the lost host, or None."""

    @property
    def name(self) -> str:
        return self.share.host.name

    @property
    def broker(self) -> RemoteBroker:
        """The host's broker, once it has been asked to serve."""
        assert self.remote.broker is not None
        return self.remote.broker


class RemoteIsland:
    """An island whose ranks run on `hosts`, or will start there.

    `pending_start` is the operation that starts the ranks, or None once they have started.
    `returns` is True if the island is rejoining while other islands train.
    """

    def __init__(
        self,
        number: int,
        ranks: range,
        hosts: Sequence[IslandHost],
        supervisor: IslandSupervisor,
        *,
        returns: bool,
    ) -> None:
        self.number, self.ranks, self.hosts = number, ranks, hosts
        self.returns = returns
        self.pending_start: Iterator[None] | None = None
        self._supervisor = supervisor

    @property
    def can_start(self) -> bool:
        return all(host.is_up for host in self.hosts)

    def resume(self) -> None:
        """Resume the pending start, and report ranks that could not start."""
        if self.pending_start is not None and next(self.pending_start, self) is self:
            self.pending_start = None
        for host in self.hosts:
            broker = host.remote.broker
            why = None if broker is None else broker.unstarted.pop(self.number, None)
            if why is not None:
                message = f"island {self.number} could not start on {host.name}: {why}"
                self._supervisor.lost(ranks_on_host(self.ranks, host), message)

    def reap(self) -> None:
        """Do nothing, because the agents report the ranks' exits."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks, or cancel their start."""
        if not self._cancel_start():
            for host in self.hosts:
                host.remote.send_signal(number, self.number)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask the ranks to stop, or cancel their start."""
        if number == signal.SIGUSR1 and self.pending_start is not None and not self.returns:
            return  # there is nothing to save before the run has started
        if not self._cancel_start():
            for host in self.hosts:
                host.remote.ask_to_end(number, self.number)

    def ended_well(self, rank: int) -> None:
        """Tell the island's ranks that `rank` exited with code 0."""
        if rank in self.ranks:
            for host in self.hosts:
                host.remote.ended_well(rank, self.number)

    def resize(self, window: tuple[int, int]) -> None:
        """Forward the terminal's new size."""
        for host in self.hosts:
            host.remote.resize(window)

    def end(self) -> None:
        """Kill the island's remaining processes."""
        self.send_signal(signal.SIGKILL)

    def release(self) -> bool:
        """Return True, because the agents clean up the processes."""
        return True

    def _cancel_start(self) -> bool:
        """Cancel a pending start. Return whether there was one."""
        if self.pending_start is None:
            return False
        self.pending_start = None
        # Nobody will report the exit of ranks that never start.
        self._supervisor.not_started(self.ranks)
        return True


def ranks_on_host(ranks: range, host: IslandHost) -> range:
    return ranks_here(ranks, host.share.first, host.share.count)
