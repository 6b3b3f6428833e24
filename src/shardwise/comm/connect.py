"""Chooses this process's transport and connects it to the other ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from socket import gethostname
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.comm import abortable_nccl
from shardwise.comm.abortable_nccl import AbortableNccl
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
    """Arguments for creating a transport.

    `group_ranks` maps this group's ranks to ranks in the run. `timeout` limits every wait, in
    seconds.
    """

    identity: Identity
    device: torch.device
    timeout: float
    group_ranks: GroupRanks
    status_server: StatusServer


class Transport(NamedTuple):
    """One entry of `TRANSPORTS`.

    `backend` is the backend of torch's default process group, which must be initialised before
    `make` is called. All ranks must call `make`.
    """

    backend: str
    make: Callable[[Members], Collectives]


LOOPBACK = "127.0.0.1"
OUTSIDE = "192.0.2.1"
"""An address that no host has (RFC 5737). Packets to it take the network's default route."""

_rendezvous: Rendezvous | None = None
"""This run's rendezvous, which stays open until all groups are closed."""


def connect(
    identity: Identity,
    device: torch.device,
    timeout: float,
    transport: str = "auto",
    rendezvous: str | None = None,
    on_meeting: OnMeeting | None = None,
    of_run: GroupRanks | None = None,
    *,
    survives: bool = False,
) -> Collectives:
    """Connect to the group that `identity` describes, over a transport selected from `TRANSPORTS`.

    Args:
        identity: This rank, the number of ranks, and the launcher.
        device: Device whose tensors the transport sends.
        timeout: Limit for every wait in seconds.
        transport: Value of `--transport`. With gloo, ranks on GPUs send through host memory, so
            several of them can share a GPU.
        rendezvous: Where ranks meet if the launcher gave them no address.
        on_meeting: Called with the store when the ranks have met. Not called under torchrun, whose
            agent owns the store.
        of_run: These ranks' numbers in the run, if the run contains other ranks too. `identity`
            numbers them from 0.
        survives: True if the run continues after losing ranks.

    Raises:
        LaunchError: The other ranks cannot be reached, or shared memory is required but
            unavailable.
        ConfigError: The transport does not support `device`.
    """
    row = TRANSPORTS.get((transport, device.type))
    if row is None:
        raise ConfigError(
            "--transport shared is for ranks on the CPU. Ranks on GPUs communicate over NCCL. "
            "Leave the flag out, let ranks share GPUs with --transport gloo, or train on the CPU "
            "with --device cpu."
        )
    if identity.launcher == "python":
        return Solo()
    if survives and row.backend == "nccl":
        abortable_nccl.prepare()
        row = Transport(abortable_nccl.BACKENDS, _abortable_nccl)
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


def wait_alone(identity: Identity) -> Collectives:
    """Return a group of one rank for a spare, whose status server other ranks can reach."""
    group = Solo()
    secret = environment.given_secret(os.environ) or ""
    group.status_server = StatusServer(identity.rank, identity.size, secret.encode())
    group.status_server.start([_listen(identity, group)])
    return group


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


def _abortable_nccl(members: Members) -> Collectives:
    identity = members.identity
    group = AbortableNccl(
        identity.rank,
        members.group_ranks,
        members.device,
        timedelta(seconds=members.timeout),
        members.status_server,
    )
    _introduce(identity, group)
    group.connect()
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
    # Ranks need a transport to agree on shared memory, and hosts need one to send to each other:
    # Gloo.
    group = _gloo(members)
    return group if group.size == 1 else share_memory(group, members.timeout, required=required)


TRANSPORTS = {
    ("auto", "cpu"): Transport("gloo", partial(_shared_memory, required=False)),
    ("auto", "cuda"): Transport("nccl", _nccl),
    ("shared", "cpu"): Transport("gloo", _shared_memory),
    ("gloo", "cpu"): Transport("gloo", _gloo),
    # NCCL does not support several ranks on one GPU.
    ("gloo", "cuda"): Transport("gloo", lambda members: HostStaged(_gloo(members), members.device)),
}
"""Transport for each value of `--transport` (see config/settings.py) and device type."""


def _introduce(identity: Identity, group: Collectives) -> None:
    """Start this rank's status server and exchange all servers' addresses. Collective."""
    if group.size == 1:
        return
    # These are the first messages over a new transport. If it does not work, it fails here and not
    # during training.
    every = group.gather_plain(asdict(_listen(identity, group)))
    group.status_server.start([RankAddress(**each) for each in every])


def _listen(identity: Identity, group: Collectives) -> RankAddress:
    # Process ids are unique only within a PID namespace. Two containers on a host may use the same
    # ids.
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    others: Sequence[str] = ()
    if environment.SURVIVES_VARIABLE in os.environ and not identity.on_one_host:
        # Connections to a lost host are closed. Gloo takes the first address of its interface,
        # which may be of another IP version.
        named = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
        others = network.all_addresses(named)
    host = f"{host_key()} {namespace}"
    return group.status_server.listen(address_of(identity), host, others)


def address_of(identity: Identity) -> str:
    """Return the address at which other ranks can reach this one."""
    if identity.on_one_host:
        return LOOPBACK
    named = os.environ.get(INTERFACE, "").split(",")[0]
    towards = identity.address or os.environ.get("MASTER_ADDR") or OUTSIDE
    try:
        found = network.address_of_interface(named) if named else network.address_towards(towards)
        # A host's name may resolve to its own loopback, which no other host can reach.
        return network.address_towards(OUTSIDE) if ip_address(found).is_loopback else found
    except (LaunchError, ValueError):  # no route: all "hosts" are the same machine
        return LOOPBACK


def disconnect() -> None:
    """Close the store in which the ranks met."""
    # Call this after closing all groups, because torch's groups look up addresses in the store.
    global _rendezvous
    met, _rendezvous = _rendezvous, None
    if met is not None:
        met.close()


def place(identity: Identity, timeout: float, rendezvous: str | None = None) -> Identity:
    """Return `identity` with its local rank and size, if the launcher has not set them.

    Collective. The ranks meet in the store that `connect` will also use, and exchange their host
    names. Local ranks are assigned in rank order.
    """
    # Most launchers set these variables. In that case ranks need not meet before `connect`.
    if identity.is_placed or identity.size == 1:
        return replace(identity, is_placed=True)
    try:
        # Use the store, because no transport exists yet: a transport needs the device, and the
        # device depends on the local rank.
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
    """Raise LaunchError if another rank cannot take part in the run. Collective.

    Without this check, this rank would wait for that rank forever. `refusal` is the reason why this
    rank cannot take part, such as a missing device, or "" if it can. No-op if the ranks have not
    met.
    """
    if _rendezvous is None:
        return
    try:
        refusals = _exchange_texts(identity, _rendezvous.store, "refusal", refusal)
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    for rank, text in enumerate(refusals):
        if text and not refusal:  # the caller raises its own error
            raise LaunchError(f"Rank {rank} cannot take part: {text}").blaming([rank])


def _exchange_texts(identity: Identity, store: Store, key: str, text: str) -> list[str]:
    """Return every rank's `text` for `key`. Rank 0 collects the texts."""
    # Rank 0 collects the texts. If every rank read every text, the store would serve size * size
    # requests. `get` blocks until the key exists, so no barrier is needed.
    store.set(f"{key}/{identity.rank}", text)
    if identity.rank == 0:
        texts = [store.get(f"{key}/{rank}").decode() for rank in range(identity.size)]
        store.set(key, json.dumps(texts))
    found: list[str] = json.loads(store.get(key))
    return found


def _meet_others(identity: Identity, timeout: float, rendezvous: str | None) -> Rendezvous:
    """Meet the other ranks, at most once per process. Under torchrun, use its agent's store."""
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
    """Initialise torch's default process group if the script has not. Return the run's secret."""
    is_torchs = identity.launcher == "torchrun"
    if dist.is_initialized():
        met = _meet_others(identity, timeout, rendezvous)
        made: str = dist.get_backend()
        if made == "undefined":  # the group has one backend per device type
            pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
            made = dict(pairs).get("cuda" if backend == "nccl" else "cpu", made)
        if made != backend:
            raise LaunchError(
                f"torch.distributed was initialised with {made} before sw.init, which needs "
                f"{backend} here. Call sw.init first, and remove init_process_group."
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
        # All ranks are connected now, so any further connection to Gloo's sockets is from a
        # stranger.
        listeners.shut()
    except (RuntimeError, ValueError) as error:
        raise _cannot_join(identity, error) from error
    # A run without a secret works, but anyone who can reach its port can join. Warn once.
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
    """Return the warning for a run whose ranks do not share a secret."""
    return (
        f"this run is open: anyone who reaches rank 0 at {address_of(identity)} while it starts "
        "can join it and run code as this user. Give all ranks a secret: set "
        f"{environment.SECRET_VARIABLE}=$(openssl rand -hex 32), and pass it on to every host "
        "(docs/security.md)."
    )


def for_thread(group: Collectives, timeout: float) -> Collectives:
    """Return a group of the same ranks, for use by another thread in each process. Collective.

    `group` must contain all ranks of the run. `timeout` limits every wait, in seconds.
    """
    # A `second_group` has separate channels. But with shared memory, a waiting thread advances the
    # calls of all groups in its process. So another thread needs separate sockets and a separate
    # arena.
    if isinstance(group, HostStaged):
        return HostStaged(for_thread(group.inner, timeout), group.device)
    if isinstance(group, SharedMemory | Hierarchical):
        assert group.under is not None
        return share_memory(group.under.second_group(), timeout, required=False)
    return group.second_group()
