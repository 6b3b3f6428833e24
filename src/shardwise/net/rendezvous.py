"""Implements the rendezvous: all ranks of a run connect to rank 0 and authenticate each other.

    rank 0       listens ─▶ writes a file ─▶ waits for all ranks ─▶ removes it, sends its address
    other ranks  read the file ─▶ connect ─▶ proof ─▶ register ─▶ wait ─▶ choose the interface

The rendezvous file (net/rendezvous_file.py) holds the secret. Both ends of a connection prove that
they know it. No file is needed if the launcher gives all ranks the secret and rank 0's address.
Under torchrun, ranks meet on torchrun's own store (torchrun_store.py).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.errors import LaunchError
from shardwise.net import (
    environment,
    network,
    private_files,
    progress,
    rendezvous_file,
    rpc,
)
from shardwise.net.identity import Identity
from shardwise.net.launchers import detection as launcher_detection
from shardwise.net.launchers import processes
from shardwise.net.rendezvous_file import RendezvousFile
from shardwise.net.store import ClientStore, HostStore, role_of

POLL = 0.02
WARN = 60.0
"""Seconds after which rank 0 prints the missing ranks."""

STARTING = 3.0
"""Seconds that a launcher may take to start the other ranks on rank 0's host."""

REACH = 5.0
"""Seconds to wait for a connection to rank 0, and to retry after a wrong secret."""

INTERFACE = "GLOO_SOCKET_IFNAME"

SILENT = "it does not answer: it may not have called sw.init, or it is stopped"

TWICE = "twice"
"""The store key that holds a rank claimed by two processes."""


class Rendezvous(NamedTuple):
    """The result of the rendezvous: a store and the run's secret.

    `is_open` is True if the secret was available to anybody who could reach the store. `close`
    closes the store.
    """

    store: Store
    secret: bytes
    is_open: bool
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """Parameters of a rendezvous.

    Args:
        identity: This process's rank.
        timeout: Time limit for the whole rendezvous, in seconds.
        deadline: The monotonic time when the limit expires.
        address: Rank 0's host and port if the launcher or the user specified them, otherwise None.
        path: The rendezvous file, or None if the ranks need no file.
        secret: The run's secret if the launcher or the user gave it to all ranks, otherwise None.
    """

    identity: Identity
    timeout: float
    deadline: float
    address: tuple[str, int] | None
    path: Path | None
    secret: str | None

    @property
    def is_open(self) -> bool:
        """True if the ranks know only rank 0's address, so anybody who reaches it can join."""
        return self.secret is None and self.path is None and self.identity.size > 1

    @property
    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def read_file(self) -> RendezvousFile | None:
        """Return rank 0's rendezvous file, or an equivalent object if the address is given."""
        if self.path is not None:
            return rendezvous_file.read(self.path)
        assert self.address is not None
        return RendezvousFile(addresses=self.address[:1], port=self.address[1], host="", pid=0)

    def __str__(self) -> str:
        return f"within {self.timeout:g} s (--timeout)"


def meet(identity: Identity, timeout: float, place: str | None) -> Rendezvous:
    """Connect to the other ranks of the run.

    Sets GLOO_SOCKET_IFNAME to the interface that leads to rank 0, unless the user has set it.

    Args:
        identity: This process's rank.
        timeout: Seconds to wait for all ranks.
        place: The `rendezvous` setting: HOST:PORT of rank 0, a folder shared by all hosts, or None.

    Raises:
        LaunchError: Some ranks are missing. The message names them.
    """
    address, secret = _given_address(identity, place), environment.given_secret(os.environ)
    path = None
    if address is None:
        if identity.launcher == "the user" and place is None and identity.size > 1:
            raise LaunchError(
                f"SHARDWISE_RANK={identity.rank} and SHARDWISE_SIZE={identity.size} do not say "
                f"how the ranks find each other: set {rendezvous_file.VARIABLE}=HOST:PORT on all "
                "ranks, with rank 0's host and a free port on it (or set it to a shared folder "
                "that no other run uses)."
            )
        path = rendezvous_file.path(identity, place)
    elif (
        secret is None
        and identity.size > 1
        and (identity.on_one_host or network.is_loopback(address[0]))
    ):
        # On a single host, a file that only this user can read passes on the secret. The address in
        # its name keeps different runs of one user apart.
        folder = str(private_files.folder())
        path = rendezvous_file.path(identity, folder, run=f"{address[0]}:{address[1]}")
    terms = _Terms(
        identity=identity,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        address=address,
        path=path,
        secret=secret,
    )
    return _host(terms) if identity.rank == 0 else _join(terms)


def _given_address(identity: Identity, place: str | None) -> tuple[str, int] | None:
    is_given = identity.launcher == "shardwise run" or place is None
    if identity.port is not None and is_given:
        return identity.address or "127.0.0.1", identity.port
    if place is not None and os.sep not in place:
        host, _, port = place.rpartition(":")
        return host.strip("[]"), int(port)
    return None


# -- rank 0 ---------------------------------------------------------------------------------


def _host(terms: _Terms) -> Rendezvous:
    """Host the store, and return once all other ranks have registered."""
    identity, listening = terms.identity, _listen(terms)
    port, secret = listening.getsockname()[1], terms.secret or environment.draw_secret()
    # In an open run, ranks know no secret before they connect. They prove that they know the empty
    # secret, and receive the generated secret through the store.
    proven = b"" if terms.is_open else secret.encode()
    survives = environment.SURVIVES_VARIABLE in os.environ
    store = HostStore(listening, proven, terms.timeout, survives=survives)
    try:
        if terms.is_open:
            store.set("secret", secret)
        with _announce(terms, port, "" if terms.secret else secret):
            _await_all(terms, store)
    except BaseException:
        store.close()
        raise
    store.accept_no_more()
    # Each rank has registered the address through which it reached rank 0. Prefer an address that
    # other hosts can reach: ranks on this host may have used the loopback address.
    seen = {store.get(here(rank)).decode() for rank in range(1, identity.size)}
    address = min(seen, key=lambda one: ipaddress.ip_address(one).is_loopback, default="127.0.0.1")
    store.set("address", address)
    _choose_interface(address)
    return Rendezvous(store, secret.encode(), terms.is_open, store.close)


def _listen(terms: _Terms) -> socket.socket:
    """Listen on the given address or interface, or on all interfaces if neither is given."""
    identity = terms.identity
    if identity.listen_fd is not None:
        return socket.socket(fileno=identity.listen_fd)
    if terms.address is not None:
        host, port = terms.address
        return network.listen(_own_address(host, identity), port)
    if identity.on_one_host:
        return network.listen("127.0.0.1", 0)
    named = _named_interface()
    return (
        network.listen(network.address_of_interface(named), 0)
        if named
        else network.listen_everywhere()
    )


def _own_address(host: str, identity: Identity) -> str:
    """Resolve `host` to an address to listen on, or "" (all addresses) if it is not this host's.

    `host` may be the address of a different device, such as a load balancer, or a loopback address
    that other hosts cannot reach.
    """
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""
    is_loopback = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    if is_loopback:
        # If the launcher does not reveal which ranks share a host, a loopback address implies that
        # all ranks are on a single host.
        return found if identity.on_one_host or not identity.is_placed else ""
    return found if network.interface_of(found) is not None else ""


def _announce(terms: _Terms, port: int, secret: str) -> AbstractContextManager[None]:
    if terms.path is None:
        return nullcontext()
    addresses = rendezvous_file.addresses(terms.identity)
    if terms.address is not None:
        addresses = terms.address[:1]
    elif not terms.identity.on_one_host and (named := _named_interface()):
        addresses = (network.address_of_interface(named),)
    host, pid = socket.gethostname(), os.getpid()
    file = RendezvousFile(
        addresses=addresses,
        port=port,
        host=host,
        pid=pid,
        secret=secret,
        began=rendezvous_file.start_time(pid),
    )
    return rendezvous_file.publish(terms.path, file)


def _await_all(terms: _Terms, store: HostStore) -> None:
    """Wait until all ranks have registered. Raises LaunchError if some of them fail to."""
    identity, warning = terms.identity, time.monotonic() + WARN
    neighbours = LocalRanks(identity)
    keys = {here(rank): rank for rank in range(1, identity.size)}
    while absent := store.absent(list(keys), 5 * POLL):
        _check_duplicates(identity, store)
        now, ended = time.monotonic(), neighbours.have_ended()
        missing = [keys[key] for key in absent]
        _check_ended(terms, missing)
        if ended or now > min(terms.deadline, warning):
            message = _describe_missing(terms, missing, ended=ended)
            if ended or not terms.left:
                raise LaunchError(message).blaming(missing)
            print(f"shardwise: {message} Still waiting.", file=sys.stderr, flush=True)
            warning = terms.deadline

    # A duplicate of a rank may have connected just before the last missing rank registered.
    _check_duplicates(identity, store)


def _check_duplicates(identity: Identity, store: HostStore) -> None:
    if store.check([TWICE]):
        raise _duplicate_rank(identity, int(store.get(TWICE)))


def _check_ended(terms: _Terms, missing: Sequence[int]) -> None:
    """Raise LaunchError if a missing rank has exited with code 0, because it will never join."""
    # A launcher nested in `shardwise run` numbers its own ranks, so the marks do not apply to them.
    if terms.identity.launcher != "shardwise run":
        return
    if gone := progress.ended_early(missing):
        raise LaunchError(
            f"{_ranks(gone)} of {terms.identity.size} ended with exit code 0 before calling "
            "sw.init, but the other ranks wait in sw.init: call it on all ranks, or on none."
        ).blaming(gone)


class LocalRanks:
    """Watches the other ranks on this host, because mpiexec and srun may ignore early exits."""

    def __init__(self, identity: Identity) -> None:
        self._size = identity.local_size
        # Search all ancestors for this launcher: the direct parent may be a nested launcher, whose
        # ranks do not count here.
        names = launcher_detection.processes_of(identity.launcher)
        above = processes.ancestors()
        self._launcher = next((pid for pid, name in above if name in names), None)
        self._fewer_since: float | None = None

    def have_ended(self) -> bool:
        """Return whether ranks of this host have been missing for more than `STARTING` seconds."""
        living = None if self._launcher is None else processes.living_children(self._launcher)
        if living is None or living >= self._size:
            self._fewer_since = None
            return False
        self._fewer_since = self._fewer_since or time.monotonic()
        return time.monotonic() > self._fewer_since + STARTING


def _describe_missing(terms: _Terms, missing: Sequence[int], *, ended: bool) -> str:
    identity = terms.identity
    message = (
        f"{_ranks(missing)} of the {identity.size} that {identity.launcher} started did not reach "
        f"rank 0 on {socket.gethostname()}."
    )
    if ended:
        return f"{message} A rank on rank 0's host has ended: look for its output."
    if not terms.left:
        message = f"{message.removesuffix('.')} {terms}."
    return message + _hint(terms)


def _hint(terms: _Terms) -> str:
    """Return a hint if ranks on several hosts use a rendezvous file, otherwise ""."""
    if terms.path is None or terms.identity.on_one_host:
        return ""
    return (
        f" Do all hosts share {terms.path.parent}? If not, name a folder that they share, or rank "
        f"0's host and a free port there: {rendezvous_file.VARIABLE}=FOLDER/ or HOST:PORT."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


# -- the other ranks ------------------------------------------------------------------------


def _join(terms: _Terms) -> Rendezvous:
    """Connect to rank 0's store, and return once all ranks have registered."""
    trouble = ""
    refused_since: float | None = None  # time since which every answer has been "another secret"
    while terms.left:
        _check_ended(terms, [0])
        file = terms.read_file()
        for name in file.addresses if file else ():
            assert file is not None
            secret = "" if terms.is_open else (terms.secret or file.secret)
            # If rank 0 inherited a listening socket, the kernel accepts connections before rank 0
            # runs, and the proof takes as long as rank 0 takes to start. Otherwise allow REACH
            # seconds to connect and REACH seconds for the proof.
            patience = terms.left if terms.path is None else min(2 * REACH, terms.left)
            place, role = (name, file.port), role_of(file.port)
            try:
                connection = rpc.connect(
                    place, secret.encode(), role, time.monotonic() + patience, reach=REACH
                )
            except OSError as error:  # try the next address
                refused = isinstance(error, rpc.Unproven)
                refused_since = (refused_since or time.monotonic()) if refused else None
                if isinstance(error, TimeoutError):
                    trouble = SILENT
                elif refused:
                    trouble = f"{error} (all ranks need the same {environment.SECRET_VARIABLE})"
                else:
                    trouble = error.strerror or str(error)
                continue
            return _register(terms, connection, secret)
        # With a given address the answer will not change. With a file it may: a killed run can
        # leave a file behind, which rank 0 of this run will replace.
        if terms.path is None and refused_since and time.monotonic() > refused_since + REACH:
            break
        time.sleep(POLL)
    raise _rank_0_not_found(terms, trouble)


def _register(terms: _Terms, connection: rpc.Connection, secret: str) -> Rendezvous:
    """Register this rank on the store and wait for the other ranks."""
    identity = terms.identity
    # On some hosts rank 0 listens on an IPv6 socket, which maps IPv4 addresses to ::ffff:a.b.c.d.
    address = connection.socket.getpeername()[0].removeprefix("::ffff:")
    store = ClientStore(connection, terms.timeout)
    try:
        # Two runs may use the same meeting place, or a script may give all processes the same rank.
        # The second process that claims a rank reports it to rank 0, so that no mixed group trains.
        if store.add(f"came/{identity.rank}", 1) > 1:
            store.set(TWICE, str(identity.rank))
            raise _duplicate_rank(identity, identity.rank)
        store.set(here(identity.rank), address)
        if store.absent(["address"], terms.left):
            keys = {here(rank): rank for rank in range(1, identity.size)}
            missing = [keys[key] for key in store.absent(list(keys))] or [0]
            raise LaunchError(
                f"Rank {identity.rank} of {identity.size} reached rank 0, but "
                f"{_ranks(missing).lower()} did not {terms}.{_hint(terms)}"
            ).blaming(missing)
        _choose_interface(store.get("address").decode())
        secret = store.get("secret").decode() if terms.is_open else secret
    except dist.DistStoreError as error:
        store.close()
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} reached rank 0, but {error}. Either rank 0 "
            "is stopped, or it gave up and its own error names the missing ranks."
        ).blaming([0]) from None
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, secret.encode(), terms.is_open, store.close)


def _duplicate_rank(identity: Identity, rank: int) -> LaunchError:
    return LaunchError(
        f"Two processes claim to be rank {rank} of {identity.size} (started by "
        f"{identity.launcher}). Give every process its own rank, and runs that start at the same "
        f"time different meeting places ({rendezvous_file.VARIABLE})."
    )


def _rank_0_not_found(terms: _Terms, trouble: str) -> LaunchError:
    identity, file = terms.identity, terms.read_file()
    if file is not None:
        place = f"at {' or '.join(file.addresses)}, port {file.port}"
        failure = f"did not reach rank 0 {place}, {terms}" + (f": {trouble}" if trouble else "")
    else:
        assert terms.path is not None
        failure = f"found no rendezvous file of rank 0 in {terms.path.parent} {terms}"
    return LaunchError(
        f"Rank {identity.rank} of {identity.size}, started by {identity.launcher} on "
        f"{socket.gethostname()}, {failure}. Did rank 0 start?{_hint(terms)}"
    ).blaming([0])


def here(rank: int) -> str:
    """Return the store key that `rank` sets to register."""
    return f"here/{rank}"


def _named_interface() -> str:
    return os.environ.get(INTERFACE, "").split(",")[0]


def _choose_interface(address: str) -> None:
    """Make Gloo use the interface that leads to `address`, unless the user has chosen one."""
    if INTERFACE not in os.environ:
        name = network.interface_of(network.address_towards(address))
        if name is not None:
            os.environ[INTERFACE] = name
