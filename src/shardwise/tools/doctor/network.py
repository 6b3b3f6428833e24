"""Tests the network: connects every host to every other, and measures the speed of all-reduce.

Connections are tried before ranks join, because joining would wait for an unreachable host. Each
host's first rank listens on a port that the kernel chooses, as ranks do. Hosts exchange the ports,
and their failures to connect, over the store where all ranks have already met.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.comm import Collectives, address_of
from shardwise.net import network
from shardwise.net.identity import Identity
from shardwise.tools.doctor.checks import Check

REACH = 3.0
"""Timeout in seconds of a connection between two hosts."""

SMALL, SMALL_TIMES = 1024, 30
LARGE, LARGE_TIMES = 2**22, 5
"""Elements of the two timed buffers, and the number of repetitions."""

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class ListeningHost:
    """The listening address of the first rank of a host."""

    host: str
    address: str
    port: int


class Unreachable(Exception):
    """Raised if some hosts cannot connect to some others; `lines` say which, and what to do."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def connect_all(identity: Identity, store: Store) -> None:
    """Connect every host to every other. A collective: raises Unreachable on all ranks or none."""
    if identity.on_one_host:
        return
    with ExitStack() as stack:
        mine = None
        # One rank per host listens and connects: ports are open or closed for a host as a whole.
        if identity.local_rank == 0:
            address = address_of(identity)
            server = stack.enter_context(network.listen(address, 0))
            mine = ListeningHost(socket.gethostname(), address, server.getsockname()[1])
        exchanged = _exchange(identity, store, "host", mine and asdict(mine))
        hosts = [ListeningHost(**each) for each in exchanged if each is not None]
        lost = [] if mine is None else _unreachable_from(mine, hosts)
        lines = [line for each in _exchange(identity, store, "lost", lost) for line in each]
        store.set(f"reach/known/{identity.rank}", "")
        for rank in range(identity.size) if identity.rank == 0 else ():
            # The store ends with rank 0, so it waits until all others have read everything.
            store.get(f"reach/known/{rank}")
    if lines:
        raise Unreachable(lines)


def _exchange(identity: Identity, store: Store, what: str, value: Any) -> list[Any]:
    """Gather every rank's `value` in rank order."""
    keys = [f"reach/{what}/{rank}" for rank in range(identity.size)]
    store.set(keys[identity.rank], json.dumps(value))
    return [json.loads(store.get(key)) for key in keys]


def _unreachable_from(mine: ListeningHost, hosts: list[ListeningHost]) -> list[str]:
    """Return a line for each host that this host cannot connect to."""
    # Every host tries all others, because a firewall may block one direction only.
    others = [host for host in hosts if host != mine]
    ports = "-".join(_RANGE.read_text().split()) if _RANGE.exists() else "that the kernel chooses"
    with ThreadPoolExecutor(min(64, len(others))) as pool:
        # In parallel: an unreachable host takes REACH seconds to find out.
        failures = list(pool.map(_failure, others))
    return [
        f"{mine.host} cannot connect to {host.host} at {host.address}, port {host.port}: "
        f"{failure}. Ranks connect to each other at TCP ports {ports}: open them between the "
        "hosts, or name a network that all hosts share with --interface NAME."
        for host, failure in zip(others, failures, strict=True)
        if failure is not None
    ]


def _failure(host: ListeningHost) -> str | None:
    try:
        socket.create_connection((host.address, host.port), timeout=REACH).close()
    except OSError as error:
        return error.strerror or "timed out"
    return None


def check(identity: Identity) -> list[Check]:
    """Return the check that all hosts have reached each other."""
    if identity.on_one_host:
        return []
    return [Check("open ports", f"others connect to {address_of(identity)}")]


@dataclass(frozen=True)
class Speed:
    """The speed of all-reduce.

    `latency` is seconds for 4 KB. `bandwidth` is bytes/s for 16 MB, counting the bytes that each
    rank must send and receive in any algorithm.
    """

    latency: float
    bandwidth: float


def measure_speed(group: Collectives, device: torch.device) -> Speed:
    """Measure all-reduce, as the median of a few calls after a warm-up. A collective."""
    small = _seconds(group, SMALL, SMALL_TIMES, device)
    large = _seconds(group, LARGE, LARGE_TIMES, device)
    # fp32 elements are 4 bytes. An all-reduce sends and receives 2 (n - 1) / n of them per rank.
    moved = 4 * LARGE * 2 * (group.size - 1) / group.size
    return Speed(latency=small, bandwidth=moved / large)


def _seconds(group: Collectives, numel: int, times: int, device: torch.device) -> float:
    buffer = group.allocate(numel, torch.float32, device)
    taken = []
    for _ in range(times + 1):
        group.barrier()  # otherwise the wait for the slowest rank would count
        began = time.perf_counter()
        handle = group.all_reduce(buffer)
        handle.wait()
        handle.reusable()
        # A GPU's collective returns when it is enqueued.
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        taken.append(time.perf_counter() - began)
    # The first call sets up connections and buffers.
    return median(taken[1:])
