"""Lets all ranks of a run meet at rank 0, and prove to each other that they are of it.

    rank 0      listens ─▶ writes a file ─▶ waits for all ─▶ removes it, says where it was reached
    the others  find the file ─▶ reach rank 0 ─▶ proof ─▶ "here I am" ─▶ on which network to talk

The rendezvous file (net/rendezvous_file.py) holds the secret that both prove to know. There is
none where the launcher gave rank 0's address and the secret. Under torchrun ranks meet on its own
store (torchrun_store.py).
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
"""Seconds after which rank 0 says for whom it waits."""

STARTING = 3.0
"""Seconds in which a launcher may still be starting the ranks beside rank 0."""

REACH = 5.0
"""Seconds for a connection to one of rank 0's addresses, and in which one may be refused."""

INTERFACE = "GLOO_SOCKET_IFNAME"

SILENT = "it does not answer, as where it has not called sw.init, or is stopped"

TWICE = "twice"
"""The key under which a rank is named that came a second time."""


class Rendezvous(NamedTuple):
    """What ranks have once they have met: a store, and the secret of their run.

    `is_open`: the secret was given to whoever reached the store. `close` closes the store.
    """

    store: Store
    secret: bytes
    is_open: bool
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """How the ranks of a run are to meet, until `deadline` of the monotonic clock.

    `address` is rank 0's, where it was given; `path` that of the rendezvous file, where there is to
    be one; `given` the secret, where all ranks were given it.
    """

    identity: Identity
    timeout: float
    deadline: float
    address: tuple[str, int] | None
    path: Path | None
    given: str | None

    @property
    def is_open(self) -> bool:
        """Whether nothing but the address is known to all ranks."""
        return self.given is None and self.path is None and self.identity.size > 1

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def found(self) -> RendezvousFile | None:
        """Rank 0's rendezvous file, or what it would say."""
        if self.path is not None:
            return rendezvous_file.read(self.path)
        assert self.address is not None
        return RendezvousFile(addresses=self.address[:1], port=self.address[1], host="", pid=0)

    def __str__(self) -> str:
        return f"within {self.timeout:g} s (--timeout)"


def meet(identity: Identity, timeout: float, place: str | None) -> Rendezvous:
    """Meet the other ranks of the run that `identity` belongs to; `timeout` in seconds.

    `place` is the setting `rendezvous`: HOST:PORT of rank 0, or a folder that all hosts share.
    Sets GLOO_SOCKET_IFNAME where it is not, to the interface over which all reach rank 0.
    Raises LaunchError where ranks do not find each other, naming those that are missing.
    """
    address, given = _given_address(identity, place), environment.given_secret(os.environ)
    path = None
    if address is None:
        if identity.launcher == "the user" and place is None and identity.size > 1:
            raise LaunchError(
                f"SHARDWISE_RANK={identity.rank} and SHARDWISE_SIZE={identity.size} do not say "
                f"where the ranks meet: set {rendezvous_file.VARIABLE}=HOST:PORT on all of them, "
                "to rank 0's host and a port that is free there (or to a folder that they share "
                "and no other run uses)."
            )
        path = rendezvous_file.path(identity, place)
    elif given is None and identity.size > 1 and (identity.on_one_host or _is_local(address[0])):
        folder = str(private_files.folder())
        path = rendezvous_file.path(identity, folder, run=f"{address[0]}:{address[1]}")
    terms = _Terms(
        identity=identity,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        address=address,
        path=path,
        given=given,
    )
    return _receive(terms) if identity.rank == 0 else _go(terms)


def _is_local(host: str) -> bool:
    """Return whether `host` is a loopback address, or the name of one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given_address(identity: Identity, place: str | None) -> tuple[str, int] | None:
    is_given = identity.launcher == "shardwise run" or place is None
    if identity.port is not None and is_given:
        return identity.address or "127.0.0.1", identity.port
    if place is not None and os.sep not in place:
        host, _, port = place.rpartition(":")
        return host.strip("[]"), int(port)
    return None


# -- rank 0's side --------------------------------------------------------------------------


def _receive(terms: _Terms) -> Rendezvous:
    """Host the store, and return it when all other ranks have come to it."""
    identity, listening = terms.identity, _listen(terms)
    port, drawn = listening.getsockname()[1], terms.given or environment.draw_secret()
    proven = b"" if terms.is_open else drawn.encode()
    hosted = HostStore(listening, proven, terms.timeout)
    try:
        if terms.is_open:
            hosted.set("secret", drawn)
        with _announced(terms, port, "" if terms.given else drawn):
            _await_all(terms, hosted)
    except BaseException:
        hosted.close()
        raise
    hosted.accept_no_more()
    seen = {hosted.get(here(rank)).decode() for rank in range(1, identity.size)}
    address = min(seen, key=lambda one: ipaddress.ip_address(one).is_loopback, default="127.0.0.1")
    hosted.set("address", address)
    _choose_interface(address)
    return Rendezvous(hosted, drawn.encode(), terms.is_open, hosted.close)


def _listen(terms: _Terms) -> socket.socket:
    """Where the others come to: at the address that they were given, or that the user's choice of
    an interface has; everywhere where nothing says by which they come."""
    identity = terms.identity
    if identity.listen_fd is not None:
        return socket.socket(fileno=identity.listen_fd)
    if terms.address is not None:
        host, port = terms.address
        return network.listen(_own(host, identity), port)
    if identity.on_one_host:
        return network.listen("127.0.0.1", 0)
    named = _named_interface()
    return (
        network.listen(network.address_of_interface(named), 0)
        if named
        else network.listen_everywhere()
    )


def _own(host: str, identity: Identity) -> str:
    """The address of this host that `host` is; "" for all, where it is none, or one that leads
    nowhere from other hosts."""
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""
    is_loopback = ipaddress.ip_address(found.partition("%")[0]).is_loopback
    if is_loopback:
        # Who gives a loopback address without saying where ranks are means one host.
        return found if identity.on_one_host or not identity.is_placed else ""
    return found if network.interface_of(found) is not None else ""


def _announced(terms: _Terms, port: int, secret: str) -> AbstractContextManager[None]:
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
        began=rendezvous_file.began(pid),
    )
    return rendezvous_file.written(terms.path, file)


def _await_all(terms: _Terms, hosted: HostStore) -> None:
    identity, warning = terms.identity, time.monotonic() + WARN
    neighbours = LocalRanks(identity)
    keys = {here(rank): rank for rank in range(1, identity.size)}
    while absent := hosted.absent(list(keys), 5 * POLL):
        _check_twice(identity, hosted)
        now, ended = time.monotonic(), neighbours.have_ended()
        missing = [keys[key] for key in absent]
        _check_ended(terms, missing)
        if ended or now > min(terms.deadline, warning):
            said = _missing(terms, missing, ended=ended)
            if ended or not terms.left:
                raise LaunchError(said).blaming(missing)
            print(f"shardwise: {said} Waiting on.", file=sys.stderr, flush=True)
            warning = terms.deadline

    _check_twice(identity, hosted)


def _check_twice(identity: Identity, hosted: HostStore) -> None:
    if hosted.check([TWICE]):
        raise _came_twice(identity, int(hosted.get(TWICE)))


def _check_ended(terms: _Terms, missing: Sequence[int]) -> None:
    """Raise LaunchError where one of the `missing` ranks has ended with code 0: it never comes."""
    if terms.identity.launcher != "shardwise run":  # a launcher inside of it counts its own ranks
        return
    if gone := progress.ended_early(missing):
        raise LaunchError(
            f"{_ranks(gone)} of {terms.identity.size} ended with exit code 0 before sw.init, where "
            "the others wait: let all ranks call it, or none."
        ).blaming(gone)


class LocalRanks:
    """Watches the ranks beside this one: mpiexec and srun may let others wait for an ended one."""

    def __init__(self, identity: Identity) -> None:
        self._size = identity.local_size
        # Another launcher above may have started the script alone, whose ranks we count then.
        names = launcher_detection.processes_of(identity.launcher)
        above = processes.ancestors()
        self._launcher = next((pid for pid, name in above if name in names), None)
        self._fewer_since: float | None = None

    def have_ended(self) -> bool:
        """Whether fewer run than were to be started, and have for a while."""
        living = None if self._launcher is None else processes.living_children(self._launcher)
        if living is None or living >= self._size:
            self._fewer_since = None
            return False
        self._fewer_since = self._fewer_since or time.monotonic()
        return time.monotonic() > self._fewer_since + STARTING


def _missing(terms: _Terms, missing: Sequence[int], *, ended: bool) -> str:
    identity = terms.identity
    said = (
        f"{_ranks(missing)} of the {identity.size} that {identity.launcher} started did not come "
        f"to rank 0 on {socket.gethostname()}."
    )
    if ended:
        return f"{said} A process beside rank 0 has ended: look for what it said."
    if not terms.left:
        said = f"{said.removesuffix('.')} {terms}."
    return said + _hint(terms)


def _hint(terms: _Terms) -> str:
    """What to look at where ranks on several hosts find each other by a file."""
    if terms.path is None or terms.identity.on_one_host:
        return ""
    return (
        f" Do all hosts share {terms.path.parent}? If not, name a folder that they share, or rank "
        f"0's host and a port that is free there: {rendezvous_file.VARIABLE}=FOLDER/ or HOST:PORT."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


# -- the others' side -----------------------------------------------------------------------


def _go(terms: _Terms) -> Rendezvous:
    """Reach the store of rank 0, and return it when all ranks have come to it."""
    trouble = ""
    refused_since: float | None = None  # since when every answer was "another secret"
    while terms.left:
        _check_ended(terms, [0])
        file = terms.found()
        for name in file.addresses if file else ():
            assert file is not None
            known = "" if terms.is_open else (terms.given or file.secret)
            # A rank 0 that was given its port has a listening socket before it runs: the kernel
            # accepts, and the proof takes as long as rank 0 takes to start.
            # Else REACH seconds to connect, and as many for the proof.
            patience = terms.left if terms.path is None else min(2 * REACH, terms.left)
            place, role = (name, file.port), role_of(file.port)
            try:
                connection = rpc.connect(
                    place, known.encode(), role, time.monotonic() + patience, reach=REACH
                )
            except OSError as error:  # this address leads nowhere; the next one may
                refused = isinstance(error, rpc.Unproven)
                refused_since = (refused_since or time.monotonic()) if refused else None
                if isinstance(error, TimeoutError):
                    trouble = SILENT
                elif refused:
                    trouble = f"{error} ({environment.SECRET_VARIABLE} must be alike on all ranks)"
                else:
                    trouble = error.strerror or str(error)
                continue
            return _come(terms, connection, known)
        if terms.path is None and refused_since and time.monotonic() > refused_since + REACH:
            break  # nothing else will be found there
        time.sleep(POLL)
    raise _did_not_find(terms, trouble)


def _come(terms: _Terms, connection: rpc.Connection, known: str) -> Rendezvous:
    """Say that this rank is here, and wait for the others."""
    identity = terms.identity
    address = connection.socket.getpeername()[0].removeprefix("::ffff:")
    store = ClientStore(connection, terms.timeout)
    try:
        # Two runs may meet at the same place, and a script may give all processes one rank. The
        # second process of a rank tells rank 0, so that none of them trains in a mixed group.
        if store.add(f"came/{identity.rank}", 1) > 1:
            store.set(TWICE, str(identity.rank))
            raise _came_twice(identity, identity.rank)
        store.set(here(identity.rank), address)
        if store.absent(["address"], terms.left):
            keys = {here(rank): rank for rank in range(1, identity.size)}
            missing = [keys[key] for key in store.absent(list(keys))] or [0]
            raise LaunchError(
                f"Rank {identity.rank} of {identity.size} came to rank 0, but "
                f"{_ranks(missing).lower()} did not come {terms}.{_hint(terms)}"
            ).blaming(missing)
        _choose_interface(store.get("address").decode())
        known = store.get("secret").decode() if terms.is_open else known
    except dist.DistStoreError as error:
        store.close()
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} came to rank 0, but {error}: others did not "
            "come in time, as it says then, or it is stopped."
        ).blaming([0]) from None
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, known.encode(), terms.is_open, store.close)


def _came_twice(identity: Identity, rank: int) -> LaunchError:
    return LaunchError(
        f"Two processes say that they are rank {rank} of {identity.size} (started by "
        f"{identity.launcher}). Does every process have a rank of its own, and does no other run "
        f"meet at the same place ({rendezvous_file.VARIABLE})?"
    )


def _did_not_find(terms: _Terms, trouble: str) -> LaunchError:
    identity, file = terms.identity, terms.found()
    if file is not None:
        where = f"at {' or '.join(file.addresses)}, port {file.port}"
        what = f"did not reach rank 0 {where}, {terms}" + (f": {trouble}" if trouble else "")
    else:
        assert terms.path is not None
        what = f"found no rendezvous file of rank 0 in {terms.path.parent} {terms}"
    return LaunchError(
        f"Rank {identity.rank} of {identity.size}, started by {identity.launcher} on "
        f"{socket.gethostname()}, {what}. Did rank 0 start?{_hint(terms)}"
    ).blaming([0])


def here(rank: int) -> str:
    """The key under which a rank says that it has come."""
    return f"here/{rank}"


def _named_interface() -> str:
    return os.environ.get(INTERFACE, "").split(",")[0]


def _choose_interface(address: str) -> None:
    """Let Gloo talk on the network where rank 0 has `address`; the user's own choice stays."""
    if INTERFACE not in os.environ:
        name = network.interface_of(network.address_towards(address))
        if name is not None:
            os.environ[INTERFACE] = name
