"""Chooses the transport of a process, and joins the other ranks over it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from socket import gethostname
from typing import NamedTuple

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


@dataclass(frozen=True, kw_only=True)
class Members:
    """What a transport is made from: the ranks of a group, and this one among them.

    `group_ranks` says which ranks of the run these are, `timeout` in seconds bounds every wait.
    """

    identity: Identity
    device: torch.device
    timeout: float
    group_ranks: GroupRanks
    status_server: StatusServer


class Transport(NamedTuple):
    """A row of `TRANSPORTS`.

    `backend` is the backend of torch's default process group, which exists already when `make` is
    called (collective).
    """

    backend: str
    make: Callable[[Members], Collectives]


LOOPBACK = "127.0.0.1"
OUTSIDE = "192.0.2.1"
"""An address that no host has: the route there is that of the whole network."""

_rendezvous: Rendezvous | None = None
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
    """Join the group that `identity` describes, over the transport that `TRANSPORTS` lists.

    Args:
        identity: This rank, the number of ranks, and the launcher.
        device: Device whose tensors the transport sends.
        timeout: Bound of every wait in seconds.
        transport: Value of `--transport`. With gloo, ranks on GPUs send through host memory, so
            that several can share a GPU.
        rendezvous: Place where ranks meet to which the launcher gave no address.
        on_meeting: Called with the store when the ranks have met; not under torchrun, which has a
            store of its own.
        of_run: The ranks of the run that these are, if there are others; `identity` counts from 0.

    Raises LaunchError if the others cannot be reached, or not by shared memory although it is
    required; ConfigError if the transport is not for `device`.
    """
    row = TRANSPORTS.get((transport, device.type))
    if row is None:
        raise ConfigError(
            "--transport shared is for ranks on the CPU; ranks on GPUs talk over NCCL. Leave the "
            "flag out, let ranks share GPUs with --transport gloo, or train on the CPU with "
            "--device cpu."
        )
    if identity.launcher == "python":
        return Solo()
    of_run = of_run or GroupRanks.whole(identity.size)
    secret = _join(identity, row.backend, timeout, rendezvous, on_meeting)
    return row.make(
        Members(
            identity=identity,
            device=device,
            timeout=timeout,
            group_ranks=of_run,
            status_server=StatusServer(of_run.ranks[identity.rank], of_run.size, secret),
        )
    )


def _nccl(members: Members) -> Collectives:
    identity = members.identity
    group = Nccl(
        identity.rank,
        identity.size,
        members.device,
        group_ranks=members.group_ranks,
        status_server=members.status_server,
        timeout=timedelta(seconds=members.timeout),
    )
    _introduce(identity, group)
    return group


def _gloo(members: Members) -> Gloo:
    identity = members.identity
    group = Gloo(
        identity.rank,
        identity.size,
        group_ranks=members.group_ranks,
        status_server=members.status_server,
        timeout=timedelta(seconds=members.timeout),
    )
    _introduce(identity, group)
    return group


def _shared_memory(members: Members, *, required: bool = True) -> Collectives:
    # Ranks need a transport to agree on shared memory, and hosts to send between them: Gloo.
    group = _gloo(members)
    return group if group.size == 1 else share_memory(group, members.timeout, required=required)


TRANSPORTS = {
    ("auto", "cpu"): Transport("gloo", partial(_shared_memory, required=False)),
    ("auto", "cuda"): Transport("nccl", _nccl),
    ("shared", "cpu"): Transport("gloo", _shared_memory),
    ("gloo", "cpu"): Transport("gloo", _gloo),
    # Ranks may share a GPU, which NCCL refuses.
    ("gloo", "cuda"): Transport("gloo", lambda found: HostStaged(_gloo(found), found.device)),
}
"""Transport for each value of `--transport` (config/settings.py lists them) and type of device."""


def _introduce(identity: Identity, group: Collectives) -> None:
    """Start the status server, and tell each rank the addresses of the others'."""
    if group.size == 1:
        return
    # Process ids are unique in one PID namespace only: two containers of a host may share ids.
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    mine = group.status_server.listen(address_of(identity), f"{host_key()} {namespace}")
    # The first messages over a new transport, so a fault of it shows here and not in training.
    every = group.gather_plain(asdict(mine))
    group.status_server.start([RankAddress(**each) for each in every])


def address_of(identity: Identity) -> str:
    """Return the address at which the other ranks can reach this one."""
    if identity.on_one_host:
        return LOOPBACK
    named = os.environ.get(INTERFACE, "").split(",")[0]
    towards = identity.address or os.environ.get("MASTER_ADDR") or OUTSIDE
    try:
        found = network.address_of_interface(named) if named else network.address_towards(towards)
        # A host's name may resolve to its own loopback, which no other host can reach.
        return network.address_towards(OUTSIDE) if ip_address(found).is_loopback else found
    except (LaunchError, ValueError):  # no route: all "hosts" are on one machine
        return LOOPBACK


def disconnect() -> None:
    """Close the store on which the ranks met."""
    # Last, when all groups are closed: torch's groups look up addresses in the store until then.
    global _rendezvous
    met, _rendezvous = _rendezvous, None
    if met is not None:
        met.close()


def place(identity: Identity, timeout: float, rendezvous: str | None = None) -> Identity:
    """Return `identity` with its local rank and size, for launchers that do not set them.

    The ranks meet, as for `connect`, which then uses the same store. They tell each other the names
    of their hosts. Ranks of a host are numbered in ascending order of rank. Collective.
    """
    # Most launchers set these variables, and then ranks need not meet before `connect`.
    if identity.is_placed or identity.size == 1:
        return replace(identity, is_placed=True)
    try:
        # Over the store, because no transport exists yet: it needs the device, and that the place.
        store = _meet_others(identity, timeout, rendezvous).store
        host = host_key() or gethostname()
        names = _exchange_texts(identity, store, "host", host)
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
    """Tell the ranks that met in `place` why this one cannot take part ("" if it can). Collective.

    A missing device is such a reason. Raises LaunchError if another rank cannot take part, because
    this one would wait for it.
    """
    if _rendezvous is None:
        return
    try:
        refusals = _exchange_texts(identity, _rendezvous.store, "refusal", refusal)
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    for rank, text in enumerate(refusals):
        if text and not refusal:  # the caller raises its own
            raise LaunchError(f"Rank {rank} cannot take part: {text}").blaming([rank])


def _exchange_texts(identity: Identity, store: Store, key: str, text: str) -> list[str]:
    """Return every rank's `text` under `key`, through rank 0."""
    # If every rank asked for every text, the store would answer size * size questions.
    # `get` blocks until the key exists, so no barrier is needed.
    store.set(f"{key}/{identity.rank}", text)
    if identity.rank == 0:
        texts = [store.get(f"{key}/{rank}").decode() for rank in range(identity.size)]
        store.set(key, json.dumps(texts))
    found: list[str] = json.loads(store.get(key))
    return found


def _meet_others(identity: Identity, timeout: float, rendezvous: str | None) -> Rendezvous:
    """Meet the other ranks, once: under torchrun on the store of its agent."""
    global _rendezvous
    if _rendezvous is None:
        if dist.is_initialized():
            _rendezvous = torchrun_store.adopt(identity, timeout)
        elif identity.launcher == "torchrun" and torchrun_store.has_store():
            _rendezvous = torchrun_store.meet(identity, timeout)
        else:
            place = None if identity.launcher == "torchrun" else rendezvous
            _rendezvous = meet(identity, timeout, place)
    return _rendezvous


def _join(
    identity: Identity,
    backend: str,
    timeout: float,
    rendezvous: str | None,
    on_meeting: OnMeeting | None,
) -> bytes:
    """Make torch's default process group, unless the script has; returns the secret of the run."""
    is_torchs = identity.launcher == "torchrun"
    if dist.is_initialized():
        met = _meet_others(identity, timeout, rendezvous)
        made: str = dist.get_backend()
        if made == "undefined":  # the group has one backend per type of device
            pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
            made = dict(pairs).get("cuda" if backend == "nccl" else "cpu", made)
        if made != backend:
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
            timeout=timedelta(seconds=timeout),
        )
        # All ranks are connected now, so any further connection to Gloo's sockets is foreign.
        listeners.shut()
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    # A run without a secret works, but anyone who reaches its port can join: say so once.
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


def _open_words(identity: Identity) -> str:
    """Return the warning about a run whose ranks share no secret."""
    return (
        f"this run is open: whoever reaches rank 0 at {address_of(identity)} while it starts may "
        "join it, and have it run code as this user. Give all ranks what only they know: "
        f"{environment.SECRET_VARIABLE}=$(openssl rand -hex 32), passed on to every host "
        "(docs/security.md)."
    )


def for_thread(group: Collectives, timeout: float) -> Collectives:
    """Return a group of the same ranks for another thread of each process. Collective.

    `group` has all ranks of the run; `timeout` in seconds bounds every wait.
    """
    # A `second_group` has channels of its own, but shared memory moves the calls of all groups of
    # a process in whichever thread waits. So another thread needs its own sockets and arena.
    if isinstance(group, HostStaged):
        return HostStaged(for_thread(group.inner, timeout), group.device)
    if isinstance(group, SharedMemory | Hierarchical):
        assert group.under is not None
        return share_memory(group.under.second_group(), timeout, required=False)
    return group.second_group()
