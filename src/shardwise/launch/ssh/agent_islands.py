"""The islands of a host that may end and come back: the agent's side of them.

launcher                    agent
    serve ->                the desk of this host, and a server for the others
    listen ->               where an island meets
    <- listening
    start_island ->         its ranks that are here run
    <- came, back, who      what they bring and ask      (island_desk.py)
    keep, fetch ->          what ranks of other hosts have brought
    <- fetched, unfetched
    settle, shut ->         what ranks get, and what is needed no longer
"""

from __future__ import annotations

import base64
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.island_workers import IslandWorkers, allow_files
from shardwise.launch.local_workers import RankExit
from shardwise.launch.ssh import protocol, transfers
from shardwise.net import network
from shardwise.net.island_desk import Contribution, Delivery, IslandDesk, Key
from shardwise.net.island_membership import ADMITS

LITTLE = 1 << 15
"""So many bytes travel through the launcher, which takes one way less than to be fetched."""

RunPart = Callable[[int, dict[str, Any], Callable[..., IslandWorkers], socket.socket | None], None]
"""Starts a part of the ranks of this host: see Agent."""


class AgentIslands:
    """The desk of this host, its server, and where its islands meet.

    `send` tells the launcher, `run_part` starts ranks. `listener` is where other hosts connect,
    `place` the address that they are told for it.
    """

    def __init__(
        self,
        send: Callable[..., None],
        selector: selectors.BaseSelector,
        stack: ExitStack,
        run_part: RunPart,
    ) -> None:
        self.listener: socket.socket | None = None
        self.place: transfers.Address = ("", 0)
        self._send = send
        self._selector = selector
        self._stack = stack
        self._run_part = run_part
        self._meetings: dict[int, list[socket.socket]] = {}
        """By island whose first rank is here: what listens for it, and a port that is kept."""

    # -- how it begins --------------------------------------------------------------------

    def on_serve(self, secret: str, ranks: int, islands: int) -> None:
        """Serve other hosts; `ranks` of `islands` islands are here."""
        if self.listener is None:
            raise protocol.ProtocolError("nothing is served before a check")
        allow_files(ranks, islands, kept=islands)
        known = secret.encode()
        self._desk = IslandDesk(self._selector, self)
        self._fetches = transfers.Fetches(self._selector, known, self._fetched, self._unfetched)
        server = transfers.Server(self.listener, self.place, known, self._desk.copy)
        for each in (self._desk, self._fetches, server):
            self._stack.callback(each.close)
        self._stack.callback(self._forget_meetings)
        self._send("serving")

    def on_listen(self, island: int, address: str) -> None:
        """Open the socket at which the ranks of `island` meet."""
        self._forget(island)
        meeting, spare = network.listen(address, 0), network.reserve_port(address)
        self._meetings[island] = [meeting, spare]
        ports = {"port": meeting.getsockname()[1], "master_port": spare.getsockname()[1]}
        self._send("listening", island=island, **ports)

    def on_start_island(self, task: dict[str, Any], **about: Any) -> None:
        """Start the ranks of `island` that are here."""
        island = about["island"]
        made: list[IslandWorkers] = []

        def make(*given: Any) -> IslandWorkers:
            *first, left, saves = given

            def ended(rank_exit: RankExit) -> None:
                # What it still says must not come after its end: another life may have begun then.
                self._desk.shut([rank_exit.end.rank])
                left(rank_exit)

            sinks = [ended, saves]
            made.append(IslandWorkers(*first, *sinks, link=self._desk.open, **about))
            return made[0]

        meeting = self._meetings.get(island, [None])[0]
        try:
            self._run_part(island, task, make, meeting)
        except (LaunchError, OSError) as error:
            for workers in made:  # not all of its ranks run, which would wait for each other
                workers.give_up()
            self._send("unstarted", island=island, why=str(error))
        finally:
            if meeting is not None:
                meeting.close()

    def _forget(self, island: int) -> None:
        for opened in self._meetings.pop(island, ()):
            opened.close()

    def _forget_meetings(self) -> None:
        for island in list(self._meetings):
            self._forget(island)

    # -- what ranks here bring and ask ----------------------------------------------------

    def came(self, what: Contribution) -> None:
        """A rank has come to an exchange, and waits."""
        data = None
        if what.size <= LITTLE or what.label.startswith(ADMITS):
            data = base64.b64encode(self._desk.read(what.key)).decode()
        self._send("came", **asdict(what), data=data)

    def asks_back(self, rank: int) -> None:
        """`rank`, of an island that is gone, asks to be let in."""
        self._send("back", rank=rank)

    def asks_who(self, rank: int) -> None:
        """`rank` asks for whom it waits."""
        self._send("who", rank=rank)

    # -- what ranks elsewhere have brought ------------------------------------------------

    def on_keep(self, rank: int, number: int, data: str) -> None:
        """Have what a rank elsewhere has brought."""
        self._desk.write((rank, number), base64.b64decode(data))

    def on_fetch(self, rank: int, number: int, address: str, port: int) -> None:
        """Fetch the same from the host that serves at an address."""
        self._fetches.begin((rank, number), (address, port))

    def on_settle(self, deliveries: list[dict[str, Any]], dropped: list[list[int]]) -> None:
        """Give ranks what is for them, and forget what is needed no longer."""
        found = [protocol.build(Delivery, each) for each in deliveries]
        keys = [(rank, number) for rank, number in dropped]
        for key in keys:
            self._fetches.cancel(key)
        self._desk.settle(
            [replace(each, keys=[(rank, number) for rank, number in each.keys]) for each in found],
            keys,
        )

    def on_shut(self, ranks: list[int]) -> None:
        """Hear these ranks no longer."""
        self._desk.shut(ranks)

    def _fetched(self, key: Key, fd: int) -> None:
        if key[1] == transfers.NOTHING:
            os.close(fd)
        else:
            self._desk.keep(key, fd)
        self._send("fetched", rank=key[0], number=key[1])

    def _unfetched(self, key: Key, why: str) -> None:
        self._send("unfetched", rank=key[0], number=key[1], why=why)
