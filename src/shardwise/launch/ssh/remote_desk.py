"""Leads to the desk of another host, where islands may end: the launcher's side of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.launch.island_hub import IslandHub
from shardwise.launch.ssh import protocol, transfers
from shardwise.net.island_desk import Contribution, Delivery, Key


class RemoteDesk:
    """A desk that is reached by `send`; `hub` hears of it, and other hosts come to it at `place`.

    `failed` is called with what could not be fetched there, and why. `serving` says that it is
    open, `meetings` where islands meet on its host, by island; `reached` and `unreached` are the
    ranks that stand for hosts from which it could fetch, and could not, and why; `unstarted` says
    why an island could not start there.
    """

    def __init__(
        self,
        send: Callable[..., None],
        hub: IslandHub,
        place: transfers.Address,
        failed: Callable[[RemoteDesk, Key, str], None],
    ) -> None:
        self.place = place
        self.serving = False
        self.meetings: dict[int, Mapping[str, int]] = {}
        self.reached: set[int] = set()
        self.unreached: dict[int, str] = {}
        self.unstarted: dict[int, str] = {}
        self.stalls: dict[Key, float] = {}
        """By what is being fetched there: since when that fails, infinity while it does not."""
        self._send, self._hub, self._failed = send, hub, failed

    # -- what the hub says ----------------------------------------------------------------

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Give ranks what is for them, and then forget what is known by the keys `dropped`."""
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
        """Know no more whether it can fetch from the host that `rank` stands for."""
        self.reached.discard(rank)
        self.unreached.pop(rank, None)

    def keep(self, key: Key, data: str) -> None:
        """Have `data`, in base64, known by `key`."""
        self._send("keep", rank=key[0], number=key[1], data=data)

    def fetch(self, key: Key, source: RemoteDesk) -> None:
        """Fetch what is known by `key` from the host of another desk."""
        if key[1] != transfers.NOTHING:
            self.stalls[key] = math.inf
        address, port = source.place
        self._send("fetch", rank=key[0], number=key[1], address=address, port=port)

    # -- what the agent says --------------------------------------------------------------

    def hear(self, message: protocol.Message) -> None:
        """Take a message of the agent."""
        values = {name: value for name, value in message.items() if name != "kind"}
        getattr(self, f"_on_{message['kind']}")(**values)

    def _on_serving(self) -> None:
        self.serving = True

    def _on_listening(self, island: int, **ports: int) -> None:
        self.meetings[island] = ports

    def _on_unstarted(self, island: int, why: str) -> None:
        self.unstarted[island] = why

    def _on_came(self, data: str | None, **values: Any) -> None:
        self._hub.came(Contribution(**values), data)

    def _on_back(self, rank: int) -> None:
        self._hub.asks_back(rank)

    def _on_who(self, rank: int) -> None:
        self._hub.asks_who(rank)

    def _on_fetched(self, rank: int, number: int) -> None:
        if number == transfers.NOTHING:
            self.reached.add(rank)
        else:
            self.stalls.pop((rank, number), None)
            self._hub.fetched(self, (rank, number))

    def _on_unfetched(self, rank: int, number: int, why: str) -> None:
        if number == transfers.NOTHING:
            self.unreached[rank] = why
        elif (key := (rank, number)) in self.stalls:  # else it is fetched no longer
            self.stalls[key] = min(self.stalls[key], time.monotonic())
            self._failed(self, key, why)

    def cannot_fetch(self, ranks: range) -> bool:
        """Whether something that one of `ranks` has brought cannot be fetched there now."""
        return any(rank in ranks and since < math.inf for (rank, _), since in self.stalls.items())
