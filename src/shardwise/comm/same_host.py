"""Detects which ranks are on the same host, and sets up shared memory between them.

All ranks make the same decision, over a group that already exists.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shardwise.comm.arena import Arena
from shardwise.comm.base import Collectives, GroupRanks
from shardwise.comm.gloo import Gloo
from shardwise.comm.hierarchical import Hierarchical, know_tree
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.shared_work import ProcessWork
from shardwise.comm.socket_mesh import connect, listen
from shardwise.errors import LaunchError

Sockets = TypeVar("Sockets", socket.socket, dict[int, socket.socket])


def share_memory(
    group: Collectives,
    timeout: float,
    *,
    required: bool,
    arena: Arena | None = None,
    in_tree: bool = False,
) -> Collectives:
    """Return `group`'s ranks over shared memory within each host, or `group` itself. Collective.

    All ranks make the same decision. `group` is returned if hosts have different numbers of ranks
    (the group's name then shows this) or if a host does not allow the sockets or the memory (rank 0
    then prints one line). If `required` is true, both cases raise LaunchError instead. `arena` is
    this rank's memory from an earlier group. By default, a new arena is created. If `in_tree` is
    true, `group` is also returned if the hosts' ranks are no nodes of the reduction tree.
    """
    keys = group.gather_plain(host_key())
    hosts = ranks_by_host(keys)
    counts = {len(ranks) for ranks in hosts}
    if None in keys or counts == {1} or len(counts) > 1:
        if required:
            raise LaunchError(_explain_refusal(keys, hosts))
        if None not in keys and len(counts) > 1:
            group.name += f" (hosts have {_listed(hosts)} ranks, so none shares memory)"
        return group
    if in_tree and not know_tree(hosts):
        return group
    found = _set_up(group, hosts, timeout, arena or Arena())
    if not isinstance(found, str):
        return found
    if required:
        raise LaunchError(
            f"--transport shared does not work here: {found}. Write --transport gloo, which needs "
            "no shared memory."
        )
    if group.rank == 0:
        print(f"shardwise: no shared memory, so Gloo is used: {found}", file=sys.stderr, flush=True)
    return group


def ranks_by_host(keys: Sequence[str | None]) -> list[list[int]]:
    """Group ranks by their host keys, in the order of each host's first rank."""
    return [[r for r, k in enumerate(keys) if k == host] for host in dict.fromkeys(keys)]


def _listed(hosts: Sequence[Sequence[int]]) -> str:
    *first, last = [str(len(ranks)) for ranks in hosts]
    return f"{', '.join(first)} and {last}"


def host_key() -> str | None:
    """Return a key that ranks have in common if they can share memory and sockets.

    Returns None if this rank cannot share them with any other rank.
    """
    # The host name is not sufficient, because cloned machines have the same name. And two
    # containers on a host may have separate network namespaces, and so no common abstract sockets.
    if not sys.platform.startswith("linux"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {network}"


def _explain_refusal(keys: Sequence[str | None], hosts: Sequence[Sequence[int]]) -> str:
    """Return the error message if shared memory is required but unavailable."""
    if None in keys:
        return (
            "--transport shared needs Linux and a readable /proc on every host, and rank "
            f"{keys.index(None)} lacks them. Leave the flag out: ranks then communicate over Gloo."
        )
    if any(len(ranks) > 1 for ranks in hosts):
        return (
            "--transport shared needs the same number of ranks on every host, and these hosts have "
            f"{_listed(hosts)}. Start equal numbers, or leave the flag out: ranks then communicate "
            "over Gloo."
        )
    return (
        "--transport shared needs several ranks on a host and in one network namespace, but rank 0 "
        f"is on {str(keys[0]).split()[0]} and rank 1 elsewhere ({str(keys[1]).split()[0]}). "
        "Leave the flag out: ranks then communicate over Gloo."
    )


def _set_up(
    group: Collectives, hosts: Sequence[Sequence[int]], timeout: float, arena: Arena
) -> SharedMemory | Hierarchical | str:
    """Return the transport, or the reason for a failure. Either all ranks succeed or none does."""
    token = group.gather_plain(secrets.token_hex(8))[0]
    mine = next(ranks for ranks in hosts if group.rank in ranks)
    name = f"{token}-{mine[0]}"
    place = mine.index(group.rank), len(mine), timeout

    def prepare() -> socket.socket:
        try:
            arena.allocate_alone(1, torch.uint8)  # fail here if the system does not allow memfds
        except LaunchError as error:
            raise (error.__cause__ or error) from None
        return listen(name, *place)

    # Two phases, with an agreement after each: no rank may connect before all ranks listen, and no
    # rank may use shared memory if another rank could not set it up.
    listener, fault = _attempt_on_all_ranks(group, prepare)
    if listener is None:
        return fault
    with listener:
        secret = group.status_server.secret
        sockets, fault = _attempt_on_all_ranks(
            group, lambda: connect(listener, name, secret, *place)
        )
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


def _attempt_on_all_ranks(
    group: Collectives, attempt: Callable[[], Sockets]
) -> tuple[Sockets | None, str]:
    """Open sockets on all ranks. If any rank fails, close them and return the first failure."""
    made, fault = None, ""
    try:
        made = attempt()
    except OSError as error:
        fault = f"rank {group.rank}: {error.strerror or error}"
    faults = [said for said in group.gather_plain(fault) if said]
    if not faults:
        return made, ""
    if made is not None:  # this rank succeeded, but another one failed
        for unused in made.values() if isinstance(made, dict) else [made]:
            unused.close()
    return None, faults[0]
