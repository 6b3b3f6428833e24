"""Connects the remaining ranks after a loss, over a new store and a new transport."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.comm import abortable_nccl
from shardwise.comm.abortable_nccl import AbortableNccl
from shardwise.comm.arena import Arena
from shardwise.comm.base import Collectives, GroupRanks, Solo
from shardwise.comm.gloo import Gloo
from shardwise.comm.hierarchical import Hierarchical
from shardwise.comm.same_host import share_memory
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.survivors.membership import Decision
from shardwise.comm.survivors.replaceable import PartGroup
from shardwise.errors import CollectiveError
from shardwise.messages.printable import ranks_in_words
from shardwise.net import environment, listeners, rpc
from shardwise.net.store import ClientStore, HostStore, role_of
from shardwise.watch.status_server import StatusServer

RunStore = HostStore | ClientStore
"""The store that connects the remaining ranks. The first of them hosts it (HostStore)."""

LOOK = 0.05
"""Seconds between two checks whether an awaited rank has exited."""

MARK = 2.0
"""Seconds within which the end of a process is known once it is certain."""


def retire(group: Collectives) -> Arena | None:
    """Close a transport that has lost a rank, and return its shared memory, if it has any."""
    listeners.close_gloo()  # those of groups over shared memory too
    if isinstance(group, SharedMemory | Hierarchical):
        return group.retire()
    if isinstance(group, AbortableNccl):
        group.retire()
        return None
    if isinstance(group, Gloo):
        group.messages.forget()
    group.close()
    return None


def retire_part(group: Collectives) -> None:
    """Close the transport of a part that has lost a rank."""
    # A shared-memory group closes its parts when it closes.
    if isinstance(group, AbortableNccl):
        group.retire()
    if isinstance(group, Hierarchical):
        group.forget()
    if isinstance(group, Gloo):
        group.messages.forget()
        group.close()


def connect(
    decision: Decision,
    number: int,
    run_size: int,
    server: StatusServer,
    listener: socket.socket | None,
    memory: Arena | None,
    shares: bool,
    device: torch.device | None,
    parts: Sequence[PartGroup],
    timeout: float,
    *,
    in_tree: bool,
) -> tuple[RunStore | None, Collectives, list[Collectives]]:
    """Connect to the members of `decision`. Collective.

    Returns the store, the transport, and the transports of its parts.

    Args:
        decision: The ranks to connect to, and the address at which the first of them listens.
        number: This rank's number in the run.
        run_size: Number of ranks at the start of the run.
        server: This rank's status server.
        listener: The listening socket, on the first member only.
        memory: This rank's shared memory from an earlier transport, if there was any.
        shares: True if the ranks of a host share memory.
        device: This rank's GPU, or None if the ranks are CPU ranks.
        parts: The parts of the group of all ranks, in the order of their creation.
        timeout: Limit for every wait, in seconds.
        in_tree: True if the transport must sum in the reduction tree of the exact mode.

    Raises:
        CollectiveError: A member has exited. In this case, torch and the network may also raise
            other errors.
    """
    members = decision.members
    rank, size = members.index(number), len(members)
    if size == 1:
        assert listener is not None
        listener.close()
        return None, Solo(), [Solo() for _ in parts]
    store: RunStore
    if listener is not None:
        store = HostStore(listener, server.secret, timeout, survives=True)
    else:
        place, role = (decision.address, decision.port), role_of(decision.port)
        until = time.monotonic() + timeout
        store = ClientStore(rpc.connect(place, server.secret, role, until), timeout)
    made: Collectives | None = None
    separate: list[Collectives] = []
    try:
        store.set(f"here/{rank}", "")
        if listener is not None:
            _await(store, [f"here/{each}" for each in range(size)], decision, server, timeout)
            assert isinstance(store, HostStore)
            store.accept_no_more()
            store.set("all here", "")
        else:
            _await(store, ["all here"], decision, server, timeout)
        seconds = timedelta(seconds=timeout)
        backend = "gloo" if device is None else abortable_nccl.BACKENDS
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=seconds)
        listeners.shut()
        ranks = GroupRanks(members, run_size, members)
        if device is None:
            made = Gloo(rank, size, group_ranks=ranks, status_server=server, timeout=seconds)
        else:
            made = AbortableNccl(rank, ranks, device, seconds, server)
            made.connect()
        if shares:
            made = share_memory(made, timeout, required=False, arena=memory, in_tree=in_tree)
        connected: dict[Collectives, tuple[Collectives, Sequence[int]]] = {}
        for part in parts:
            inner, left = connected.get(part.parent, (made, members))
            separate.append(part.split_again(inner, left))
            connected[part] = separate[-1], part.places_among(left)
        # The group is complete once every member has reached this barrier. If one exits before,
        # its socket is closed, and the others agree again.
        made.barrier()
    except BaseException:
        for each in separate:
            retire_part(each)
        if made is not None:
            retire(made)
        elif dist.is_initialized():
            dist.destroy_process_group()
        store.close()
        raise
    return store, made, separate


def _await(
    store: RunStore, keys: list[str], decision: Decision, server: StatusServer, timeout: float
) -> None:
    """Wait for `keys`. Raises CollectiveError if a member exits first, or after the timeout."""
    until = time.monotonic() + timeout
    while store.absent(keys, LOOK):
        ended = [rank for rank in decision.members if server.has_ended(rank)]
        if ended or time.monotonic() > until:
            raise CollectiveError(
                f"No new connection to {ranks_in_words(ended or decision.members)}."
            ).blaming(ended)


def wait_for_end(members: Sequence[int], server: StatusServer, timeout: float) -> list[int]:
    """Return the ranks of `members` that have exited, or [] if none has.

    A rank's sockets are closed before its end is known: the launcher has to report the end of a
    rank on another host. Wait as long as it may take, but at most `timeout` seconds.
    """
    lost_after = float(os.environ.get(environment.LOST_AFTER_VARIABLE, 0))
    until = time.monotonic() + min(timeout, lost_after + MARK)
    while True:
        ended = [rank for rank in members if server.has_ended(rank)]
        if ended or time.monotonic() > until:
            return ended
        time.sleep(LOOK)
