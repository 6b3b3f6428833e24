"""The launcher's agent on each host of a run with elastic islands.

launcher                    agent
    serve ->                starts this host's broker, and a server for the other hosts
    listen ->               opens the socket for an island's rendezvous
    <- listening
    start_island ->         starts the island's ranks on this host
    <- contribution, back, who  messages from its ranks      (broker.py)
    keep, fetch ->          files from ranks on other hosts
    <- fetched, unfetched
    settle, shut ->         messages and files for ranks; files to drop; links to close
"""

from __future__ import annotations

import base64
import os
import socket
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.islands.elastic import transfers
from shardwise.islands.elastic.broker import Contribution, Delivery, HostBroker, Key
from shardwise.islands.elastic.membership import ADMITS
from shardwise.islands.elastic.workers import IslandWorkers, allow_files
from shardwise.launch.local_workers import RankExit
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import protocol
from shardwise.launch.ssh.agent import Agent, main
from shardwise.net import network

LITTLE = 1 << 15
"""Files up to this size in bytes are sent through the launcher, which saves a round trip."""

TO_ISLANDS: protocol.Kinds = {
    "serve": {"secret": str, "ranks": int, "islands": int},
    "listen": {"island": int, "address": str},
    "start_island": {
        "meeting": dict,
        "streams": dict,
        "island": int,
        "count": int,
        "returns": bool,
    },
    "keep": {"rank": int, "number": int, "data": str},
    "fetch": {"rank": int, "number": int, "address": str, "port": int},
    "settle": {"deliveries": [dict], "dropped": [[int]]},
    "shut": {"ranks": [int]},
}

FROM_ISLANDS: protocol.Kinds = {
    "serving": {},
    "listening": {"island": int, "port": int, "master_port": int},
    "unstarted": {"island": int, "why": str},
    "contribution": {
        "rank": int,
        "number": int,
        "size": int,
        "label": str,
        "alone": bool,
        "resumes": bool,
        "data": (str, type(None)),
    },
    "back": {"rank": int},
    "who": {"rank": int},
    "fetched": {"rank": int, "number": int},
    "unfetched": {"rank": int, "number": int, "why": str},
}
OF_A_RANK = ("contribution", "back", "who")
"""Kinds of messages that are about a single rank of the host."""


class IslandAgent(Agent):
    """An agent that also runs this host's broker and file server, and opens rendezvous sockets."""

    kinds: protocol.Kinds = {**protocol.TO_AGENT, **TO_ISLANDS}  # noqa: RUF012

    def __init__(self, signals: Signals, stack: ExitStack) -> None:
        super().__init__(signals, stack)
        self._meetings: dict[int, list[socket.socket]] = {}
        """For each island whose first rank is here: its listening socket and a reserved port."""

    # -- the start ------------------------------------------------------------------------

    def on_serve(self, secret: str, ranks: int, islands: int) -> None:
        """Start this host's broker, and its file server for other hosts.

        `ranks` is the number of ranks on this host, and `islands` the number of islands in the run.
        """
        if self._listener is None:
            raise protocol.ProtocolError("serve before check")
        # The agent also holds files from ranks on other hosts.
        allow_files(ranks, islands, kept=islands)
        known = secret.encode()
        self._broker = HostBroker(self._selector, self)
        self._fetches = transfers.Fetches(self._selector, known, self._fetched, self._unfetched)
        server = transfers.serve(self._listener, self._place, known, self._broker.copy)
        for each in (self._broker, self._fetches, server):
            self._stack.callback(each.close)
        for island in range(islands):
            self._stack.callback(self._close_meeting, island)
        self._send("serving")

    def on_listen(self, island: int, address: str) -> None:
        """Open the listening socket for island `island`'s rendezvous."""
        self._close_meeting(island)
        meeting, spare = network.listen(address, 0), network.reserve_port(address)
        self._meetings[island] = [meeting, spare]
        ports = {"port": meeting.getsockname()[1], "master_port": spare.getsockname()[1]}
        self._send("listening", island=island, **ports)

    def on_start_island(
        self, meeting: dict[str, Any], streams: dict[str, Any], **about: Any
    ) -> None:
        """Start an island's ranks on this host. `about` holds the arguments of `IslandWorkers`."""
        island = about["island"]
        started: list[IslandWorkers] = []

        def make(*arguments: Any) -> IslandWorkers:
            *first, on_exit, saves = arguments

            def ended(rank_exit: RankExit) -> None:
                # No messages may arrive after the rank has exited, because the island may have
                # restarted.
                self._broker.shut([rank_exit.end.rank])
                on_exit(rank_exit)

            sinks = [ended, saves]
            started.append(IslandWorkers(*first, *sinks, link=self._broker.open, **about))
            return started[0]

        listener = self._meetings.get(island, [None])[0]
        try:
            self._run_part(island, meeting, streams, make, listener)
        except (LaunchError, OSError) as error:
            for workers in started:  # started ranks would wait for the others
                workers.give_up()
            self._send("unstarted", island=island, why=str(error))
        finally:
            if listener is not None:
                listener.close()

    def _close_meeting(self, island: int) -> None:
        for opened in self._meetings.pop(island, ()):
            opened.close()

    # -- messages of ranks of this host ---------------------------------------------------

    def contribute(self, what: Contribution) -> None:
        """Forward a rank's contribution to the launcher."""
        # An admission is always sent through the launcher, because all ranks of the admitted
        # islands receive it and their hosts may have just started.
        data = None
        if what.size <= LITTLE or what.label.startswith(ADMITS):
            data = base64.b64encode(self._broker.read(what.key)).decode()
        self._send("contribution", **asdict(what), data=data)

    def request_return(self, rank: int) -> None:
        """Forward `rank`'s request to be admitted."""
        self._send("back", rank=rank)

    def report_missing(self, rank: int) -> None:
        """Forward `rank`'s request for the list of missing ranks."""
        self._send("who", rank=rank)

    # -- files of ranks of other hosts ----------------------------------------------------

    def on_keep(self, rank: int, number: int, data: str) -> None:
        """Store the base64-encoded content `data` of file `number` from `rank` on another host."""
        self._broker.write((rank, number), base64.b64decode(data))

    def on_fetch(self, rank: int, number: int, address: str, port: int) -> None:
        """Start fetching file `number` of `rank` from the server at `address`."""
        self._fetches.begin((rank, number), (address, port))

    def on_settle(self, deliveries: list[dict[str, Any]], dropped: list[list[int]]) -> None:
        """Deliver messages and files to ranks, then delete the files in `dropped`."""
        messages = [protocol.build(Delivery, each) for each in deliveries]
        # Cancel the fetches of dropped files first. Otherwise the files would arrive after the
        # drop.
        keys = [(rank, number) for rank, number in dropped]
        for key in keys:
            self._fetches.cancel(key)
        deliveries_here = [
            replace(each, keys=[(rank, number) for rank, number in each.keys]) for each in messages
        ]
        self._broker.settle(deliveries_here, keys)

    def on_shut(self, ranks: list[int]) -> None:
        """Close the links to `ranks`."""
        self._broker.shut(ranks)

    def _fetched(self, key: Key, fd: int) -> None:
        if key[1] == transfers.NOTHING:
            os.close(fd)
        else:
            self._broker.keep(key, fd)
        self._send("fetched", rank=key[0], number=key[1])

    def _unfetched(self, key: Key, why: str) -> None:
        self._send("unfetched", rank=key[0], number=key[1], why=why)


if __name__ == "__main__":
    main(IslandAgent)
