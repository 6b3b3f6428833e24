"""Chooses the transport of a process, and joins the other ranks over it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from ipaddress import ip_address
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.comm.base import Collectives, GroupRanks, Solo
from shardwise.comm.gloo import Gloo
from shardwise.comm.hierarchical import Hierarchical
from shardwise.comm.host_staged import HostStaged
from shardwise.comm.nccl import Nccl
from shardwise.comm.same_host import host_key, share_memory
from shardwise.comm.shared_memory import SharedMemory
from shardwise.errors import ConfigError, LaunchError
from shardwise.net import environment, listeners, network, torchrun_store
from shardwise.net.identity import Identity
from shardwise.net.rendezvous import INTERFACE, Rendezvous, meet
from shardwise.watch.status_server import RankAddress, StatusServer

OnMeeting = Callable[[Identity, Store], None]

LOOPBACK = "127.0.0.1"
OUTSIDE = "192.0.2.1"
"""An address that no host has: the route there is that of the whole network."""

_met: Rendezvous | None = None
"""The rendezvous of this run, kept open until all groups are closed."""


def connect(
    identity: Identity,
    device: torch.device,
    timeout: float,
    transport: str = "auto",
    rendezvous: str | None = None,
    on_meeting: OnMeeting | None = None,
    of_run: GroupRanks | None = None,
) -> Collectives:
    """Join the group that `identity` describes; `timeout` in seconds bounds every wait.

    `transport` is auto, shared or gloo: how CPU ranks talk; with gloo, ranks on GPUs talk through
    the host, so that several can share one. `rendezvous` is where ranks meet that were given no
    address; `on_meeting` is called when they have, with the store, but not under torchrun, whose
    store is its own. `of_run` says which ranks of the run these are, where they are not all:
    `identity` counts them from 0. Raises LaunchError when the others cannot be reached, or not by
    shared memory as asked; ConfigError where it is not for `device`.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and transport == "shared":
        raise ConfigError(
            "--transport shared is for ranks on the CPU; ranks on GPUs talk over NCCL. Leave the "
            "flag out, let ranks share GPUs with --transport gloo, or train on the CPU with "
            "--device cpu."
        )
    if identity.launcher == "python":
        return Solo()
    backend = "nccl" if on_gpu and transport == "auto" else "gloo"
    of_run = of_run or GroupRanks.whole(identity.size)
    secret = _join(identity, backend, timeout, rendezvous, on_meeting)
    status_server = StatusServer(of_run.ranks[identity.rank], of_run.size, secret)
    common: dict[str, Any] = {
        "group_ranks": of_run,
        "status_server": status_server,
        "timeout": timedelta(seconds=timeout),
    }
    if on_gpu and transport == "auto":
        alone = Nccl(identity.rank, identity.size, device, **common)
        _meet(identity, alone)
        return alone
    group = Gloo(identity.rank, identity.size, **common)
    _meet(identity, group)
    if on_gpu:
        return HostStaged(group, device)
    if transport == "gloo" or identity.size == 1:
        return group
    return share_memory(group, timeout, required=transport == "shared")


def _meet(identity: Identity, group: Collectives) -> None:
    """Start the status server, and let those of all ranks know each other."""
    if group.size == 1:
        return
    name = f"{host_key()} {_process_space()}"
    mine = asdict(group.status_server.listen(address_of(identity), name))
    group.status_server.start([RankAddress(**each) for each in group.gather_plain(mine)])


def _process_space() -> str:
    """What tells apart processes of equal number in two containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def address_of(identity: Identity) -> str:
    """Where the other ranks can reach this one."""
    if identity.on_one_host:
        return LOOPBACK
    named = os.environ.get(INTERFACE, "").split(",")[0]
    towards = identity.address or os.environ.get("MASTER_ADDR") or OUTSIDE
    try:
        found = network.address_of_interface(named) if named else network.address_towards(towards)
        # A host's name may lead to itself by its loopback, where no other host comes.
        return network.address_towards(OUTSIDE) if ip_address(found).is_loopback else found
    except (LaunchError, ValueError):  # as where hosts are on one machine without a network
        return LOOPBACK


def disconnect() -> None:
    """Close the store on which ranks have met; the last step, when all groups are closed."""
    global _met
    met, _met = _met, None
    if met is not None:
        met.close()


def place(identity: Identity, timeout: float, rendezvous: str | None = None) -> Identity:
    """Return `identity` with its local rank and size, for launchers that do not say them.

    The ranks meet as `connect` does, which takes their meeting over, and tell each other their
    hosts' names. Ranks of a host are numbered in the order of their ranks. Collective.
    """
    if identity.is_placed or identity.size == 1:
        return replace(identity, is_placed=True)
    try:
        store = _meet_others(identity, timeout, rendezvous).store
        host = host_key() or gethostname()
        names = _told_by_all(identity, store, "host", host)
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    here = [rank for rank, name in enumerate(names) if name == host]
    return replace(
        identity,
        local_rank=here.index(identity.rank),
        local_size=len(here),
        node=list(dict.fromkeys(names)).index(host),
        is_placed=True,
    )


def check_all(identity: Identity, refusal: str) -> None:
    """Tell the ranks that met in `place` why this one cannot take part, such as a device that it
    lacks; "" if it can. Collective.

    Raises LaunchError if another rank cannot: this one would wait for it.
    """
    if _met is None:
        return
    try:
        said = _told_by_all(identity, _met.store, "refusal", refusal)
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    for rank, text in enumerate(said):
        if text and not refusal:  # the caller raises its own
            raise LaunchError(f"Rank {rank} cannot take part: {text}").blaming([rank])


def _told_by_all(identity: Identity, store: Store, key: str, text: str) -> list[str]:
    """Return the text of each rank under `key`, by way of rank 0: `size` questions in place of
    their square."""
    store.set(f"{key}/{identity.rank}", text)
    if identity.rank == 0:
        texts = [store.get(f"{key}/{rank}").decode() for rank in range(identity.size)]
        store.set(key, json.dumps(texts))
    found: list[str] = json.loads(store.get(key))
    return found


def _meet_others(identity: Identity, timeout: float, rendezvous: str | None) -> Rendezvous:
    """Meet the other ranks, once; torchrun's on the store of its agent."""
    global _met
    if _met is None:
        if dist.is_initialized():
            _met = torchrun_store.adopt(identity, timeout)
        elif identity.launcher == "torchrun" and torchrun_store.has_store():
            _met = torchrun_store.meet(identity, timeout)
        else:
            place = None if identity.launcher == "torchrun" else rendezvous
            _met = meet(identity, timeout, place)
    return _met


def _join(
    identity: Identity,
    backend: str,
    timeout: float,
    rendezvous: str | None,
    on_meeting: OnMeeting | None,
) -> bytes:
    """Make torch's default process group, or take the one that there is.

    Returns the secret of the run.
    """
    limit, is_torchs = timedelta(seconds=timeout), identity.launcher == "torchrun"
    if dist.is_initialized():
        met = _meet_others(identity, timeout, rendezvous)
        if (made := _backend_for("cuda" if backend == "nccl" else "cpu")) != backend:
            raise LaunchError(
                f"torch.distributed was initialised with {made} before sw.init, which takes "
                f"{backend} here: call sw.init first, and leave init_process_group out."
            )
        return met.secret
    try:
        met = _meet_others(identity, timeout, rendezvous)
        if on_meeting is not None and not is_torchs:
            on_meeting(identity, met.store)
        dist.init_process_group(
            backend,
            store=met.store,
            rank=identity.rank,
            world_size=identity.size,
            timeout=limit,
        )
        # All ranks are connected now: whoever comes to Gloo's sockets from here on is a stranger.
        listeners.shut()
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    if met.is_open and identity.rank == 0:
        print(f"shardwise: {_open_words(identity)}", file=sys.stderr, flush=True)
    return met.secret


def _cannot_join(identity: Identity, error: Exception) -> LaunchError:
    where = f" at {identity.address}:{identity.port}" if identity.port is not None else ""
    return LaunchError(
        f"Rank {identity.rank} of {identity.size} cannot join the others{where} (started by "
        f"{identity.launcher}): {str(error).splitlines()[0]}. Is the port in use by another run, "
        "or did a rank not start?"
    )


def _backend_for(device: str) -> str:
    """The backend that the default process group has for a kind of device; where the group has one
    for each kind, it goes by the name "undefined" itself."""
    one = dist.get_backend()
    if one != "undefined":
        return one
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return dict(pairs).get(device, one)


def _open_words(identity: Identity) -> str:
    """The warning about a run whose ranks share no secret."""
    return (
        f"this run is open: whoever reaches rank 0 at {address_of(identity)} while it starts may "
        "join it, and have it run code as this user. Give all ranks what only they know: "
        f"{environment.SECRET_VARIABLE}=$(openssl rand -hex 32), passed on to every host "
        "(docs/security.md)."
    )


def for_thread(group: Collectives, timeout: float) -> Collectives:
    """Make the same ranks a group of their own, for another thread of each process. Collective.

    A transport belongs to one thread: whoever waits on it moves all of its calls. What shares
    memory is therefore made anew, over channels and memory that nobody else uses. `timeout` in
    seconds bounds every wait; `group` has all ranks of the run.
    """
    if isinstance(group, HostStaged):
        return HostStaged(for_thread(group.inner, timeout), group.device)
    if isinstance(group, SharedMemory | Hierarchical):
        assert group.under is not None
        return share_memory(group.under.second_group(), timeout, required=False)
    return group.second_group()
