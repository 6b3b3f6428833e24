"""Tests the network: connects each host to every other host, and measures all-reduce.

Connections are tested before the ranks join, because joining would block on an unreachable host.
The first rank on each host listens on a port that the kernel chooses, as in a run. The ranks
exchange these ports and any connection failures over the store, which all ranks can reach already.
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
"""Timeout in seconds for connecting two hosts."""

SMALL, SMALL_TIMES = 1024, 30
LARGE, LARGE_TIMES = 2**22, 5
"""Numbers of elements and repetitions for the small and the large buffer."""

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class ListeningHost:
    """The address of a host's first rank, which listens for connections."""

    host: str
    address: str
    port: int


class Unreachable(Exception):
    """Raised if hosts cannot connect to each other. `lines` name the hosts and suggest remedies."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def connect_all(identity: Identity, store: Store) -> None:
    """Connect each host to every other host. Collective.

    Raises Unreachable on every rank if any connection fails.
    """
    if identity.on_one_host:
        return
    with ExitStack() as stack:
        mine = None
        # One rank per host is enough, because firewalls open or close ports for the whole host.
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
            # Rank 0 hosts the store, so it must wait until all other ranks have read everything.
            store.get(f"reach/known/{rank}")
    if lines:
        raise Unreachable(lines)


def _exchange(identity: Identity, store: Store, what: str, value: Any) -> list[Any]:
    """Gather `value` from every rank, in rank order. Collective."""
    keys = [f"reach/{what}/{rank}" for rank in range(identity.size)]
    store.set(keys[identity.rank], json.dumps(value))
    return [json.loads(store.get(key)) for key in keys]


def _unreachable_from(mine: ListeningHost, hosts: list[ListeningHost]) -> list[str]:
    """Return one line for each host to which this host cannot connect."""
    # Every host tries all others, because a firewall may block only one direction.
    others = [host for host in hosts if host != mine]
    ports = "-".join(_RANGE.read_text().split()) if _RANGE.exists() else "that the kernel chooses"
    with ThreadPoolExecutor(min(64, len(others))) as pool:
        # Connect in parallel, because an unreachable host takes REACH seconds to time out.
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
    """Return a check that reports successful connections between hosts, or [] for a single host.

    `connect_all` has already raised an error if a connection failed.
    """
    if identity.on_one_host:
        return []
    return [Check("open ports", f"others connect to {address_of(identity)}")]


@dataclass(frozen=True)
class Speed:
    """The speed of all-reduce.

    `latency` is the time for 4 KB in seconds. `bandwidth` is the bus bandwidth for 16 MB in
    bytes/s. It counts only the bytes that each rank has to send whatever the algorithm.
    """

    latency: float
    bandwidth: float


def measure_speed(group: Collectives, device: torch.device) -> Speed:
    """Measure all-reduce, as the median of several calls after a warm-up. Collective."""
    small = _seconds(group, SMALL, SMALL_TIMES, device)
    large = _seconds(group, LARGE, LARGE_TIMES, device)
    # fp32 elements have 4 bytes. In an all-reduce, each rank sends and receives 2 (n - 1) / n
    # times the size of the buffer.
    moved = 4 * LARGE * 2 * (group.size - 1) / group.size
    return Speed(latency=small, bandwidth=moved / large)


def _seconds(group: Collectives, numel: int, times: int, device: torch.device) -> float:
    buffer = group.allocate(numel, torch.float32, device)
    taken = []
    for _ in range(times + 1):
        group.barrier()  # otherwise the time would include the wait for the slowest rank
        began = time.perf_counter()
        handle = group.all_reduce(buffer)
        handle.wait()
        handle.reusable()
        # A collective on a GPU returns as soon as it is enqueued.
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        taken.append(time.perf_counter() - began)
    # Skip the first call, which sets up connections and buffers.
    return median(taken[1:])
