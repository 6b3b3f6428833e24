"""Finds out which ranks are on one host, and sets up shared memory between them.

Ranks decide together, over a group that they already have.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shardwise.comm.arena import Arena
from shardwise.comm.base import Collectives, GroupRanks
from shardwise.comm.gloo import Gloo
from shardwise.comm.hierarchical import Hierarchical
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.shared_work import ProcessWork
from shardwise.comm.socket_mesh import connect, listen
from shardwise.errors import LaunchError

T = TypeVar("T")


def share_memory(group: Collectives, timeout: float, *, required: bool) -> Collectives:
    """The ranks of `group` over the memory that those of each host share, or `group` itself where
    that cannot be.

    All ranks decide alike. Where hosts have different numbers of ranks the name of `group` says
    so; where a host's sockets or memory fail, rank 0 says so in one line. Raises LaunchError
    instead where it is `required`.
    """
    keys = group.gather_plain(host_key())
    hosts = ranks_by_host(keys)
    counts = {len(ranks) for ranks in hosts}
    if None in keys or counts == {1} or len(counts) > 1:
        if required:
            raise LaunchError(_apart(keys, hosts))
        if None not in keys and len(counts) > 1:
            group.name += f" (hosts have {_listed(hosts)} ranks, so none shares memory)"
        return group
    found = _try(group, hosts, timeout)
    if not isinstance(found, str):
        return found
    if required:
        raise LaunchError(f"--transport shared cannot be: {found}. --transport gloo does without.")
    if group.rank == 0:
        print(f"shardwise: no shared memory, so Gloo is used: {found}", file=sys.stderr, flush=True)
    return group


def ranks_by_host(keys: Sequence[str | None]) -> list[list[int]]:
    """The ranks of each host, by the key that each rank gave; hosts in the order of their first."""
    return [[r for r, k in enumerate(keys) if k == host] for host in dict.fromkeys(keys)]


def _listed(hosts: Sequence[Sequence[int]]) -> str:
    *first, last = [str(len(ranks)) for ranks in hosts]
    return f"{', '.join(first)} and {last}"


def host_key() -> str | None:
    """A key that ranks have in common which can share memory and sockets; None where none can."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {network}"


def _apart(keys: Sequence[str | None], hosts: Sequence[Sequence[int]]) -> str:
    """Say why ranks cannot share memory, where the user asked for it."""
    if None in keys:
        return (
            "--transport shared needs Linux and a readable /proc on every host, which rank "
            f"{keys.index(None)} has not. Leave the flag out: ranks then talk over Gloo."
        )
    if any(len(ranks) > 1 for ranks in hosts):
        return (
            "--transport shared needs as many ranks on every host, and these have "
            f"{_listed(hosts)}. Start equal numbers, or leave the flag out: ranks then talk over "
            "Gloo."
        )
    return (
        "--transport shared needs several ranks on a host and in one network namespace, but rank 0 "
        f"is on {str(keys[0]).split()[0]} and rank 1 elsewhere ({str(keys[1]).split()[0]}). "
        "Leave the flag out: ranks then talk over Gloo."
    )


def _try(
    group: Collectives, hosts: Sequence[Sequence[int]], timeout: float
) -> SharedMemory | Hierarchical | str:
    """Set up the transport; returns it, or why there is none. Alike on all ranks."""
    drawn = group.gather_plain(secrets.token_hex(8))[0]
    mine = next(ranks for ranks in hosts if group.rank in ranks)
    name, arena = f"{drawn}-{mine[0]}", Arena()
    place = mine.index(group.rank), len(mine), timeout

    def prepare() -> socket.socket:
        _try_memory(arena)
        return listen(name, *place)

    prepared = _together(group, prepare, _single)
    listener, fault = prepared
    if listener is None:
        return fault
    with listener:
        known = group.status_server.secret
        joined = _together(group, lambda: connect(listener, name, known, *place), _each)
    sockets, fault = joined
    if sockets is None:
        return fault
    of_run = group.group_ranks if isinstance(group, Gloo) else GroupRanks.whole(group.size)
    group_ranks = of_run.part(mine)
    inside = SharedMemory(
        sockets,
        ProcessWork(group.status_server),
        arena,
        *place,
        under=group,
        group_ranks=group_ranks,
    )
    if len(hosts) == 1:
        return inside
    between = group.split([sorted(column) for column in zip(*hosts, strict=True)])
    assert isinstance(between, Gloo)
    return Hierarchical(inside, between, hosts, group.rank, group)


def _try_memory(arena: Arena) -> None:
    """Raise OSError where the system refuses memory that ranks share."""
    try:
        arena.alone(1, torch.uint8)
    except LaunchError as error:
        raise (error.__cause__ or error) from None


def _together(
    group: Collectives,
    attempt: Callable[[], T],
    opened: Callable[[T], Iterable[socket.socket]],
) -> tuple[T | None, str]:
    """Run `attempt` on all ranks: what it makes, or None and the first failure of any.

    `opened` are the sockets in what it made, closed again where others failed.
    """
    made, fault = None, ""
    try:
        made = attempt()
    except OSError as error:
        fault = f"rank {group.rank}: {error.strerror or error}"
    faults = [said for said in group.gather_plain(fault) if said]
    if not faults:
        return made, ""
    for unused in opened(made) if made is not None else ():
        unused.close()
    return None, faults[0]


def _single(made: socket.socket) -> list[socket.socket]:
    return [made]


def _each(made: dict[int, socket.socket]) -> list[socket.socket]:
    return list(made.values())
