"""Whether every host can connect to every other: tried before ranks join, who would else wait.

Each host's first rank listens on a port that the kernel chooses, as ranks do. Where the others
find it is told over the store on which all have met, and so is who did not get through.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.collectives import address_of
from shardwise.doctor.checks import Check
from shardwise.launch import network
from shardwise.launch.identity import Identity

REACH = 3.0
"""Seconds for a connection between two hosts."""

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Door:
    """Where the first rank of a host listens."""

    host: str
    address: str
    port: int


class Unreachable(Exception):
    """Some hosts cannot connect to some others; `lines` say which, and what to do."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def try_all(identity: Identity, store: Store) -> None:
    """Connect every host to every other. Collective; raises Unreachable on all ranks alike."""
    if identity.on_one_host:
        return
    with ExitStack() as stack:
        mine = None
        if identity.local_rank == 0:
            address = address_of(identity)
            listening = stack.enter_context(network.listen(address, 0))
            mine = Door(socket.gethostname(), address, listening.getsockname()[1])
        told = _tell(identity, store, "door", mine and asdict(mine))
        doors = [Door(**each) for each in told if each is not None]
        lost = [] if mine is None else _lost(mine, doors)
        lines = [line for each in _tell(identity, store, "lost", lost) for line in each]
        store.set(f"reach/known/{identity.rank}", "")
        for rank in range(identity.size) if identity.rank == 0 else ():
            store.get(f"reach/known/{rank}")  # the store goes with rank 0: it leaves last
    if lines:
        raise Unreachable(lines)


def _tell(identity: Identity, store: Store, what: str, value: Any) -> list[Any]:
    """Every rank's `value`, in rank order."""
    keys = [f"reach/{what}/{rank}" for rank in range(identity.size)]
    store.set(keys[identity.rank], json.dumps(value))
    return [json.loads(store.get(key)) for key in keys]


def _lost(mine: Door, doors: list[Door]) -> list[str]:
    """In words, the doors to which no connection can be made from here."""
    others = [door for door in doors if door != mine]
    with ThreadPoolExecutor(min(64, len(others))) as pool:
        failures = list(pool.map(_failure, others))
    return [
        f"{mine.host} cannot connect to {door.host} at {door.address}, port {door.port}: "
        f"{failure}. {_advice()}"
        for door, failure in zip(others, failures, strict=True)
        if failure is not None
    ]


def _failure(door: Door) -> str | None:
    try:
        socket.create_connection((door.address, door.port), timeout=REACH).close()
    except OSError as error:
        return error.strerror or "timed out"
    return None


def _advice() -> str:
    ports = "-".join(_RANGE.read_text().split()) if _RANGE.exists() else "that kernels choose"
    return (
        f"Ranks connect to each other at TCP ports {ports}: open them between the hosts, or name "
        "a network that all share, with --interface NAME."
    )


def check(identity: Identity) -> list[Check]:
    """The line of the table, once all hosts have reached each other."""
    if identity.on_one_host:
        return []
    return [Check("open ports", f"others connect to {address_of(identity)}")]
