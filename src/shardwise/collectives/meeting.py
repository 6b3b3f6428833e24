"""The store on which all ranks of a run first meet.

    rank 0      listens ─▶ leaves a note ─▶ waits for all ─▶ removes the note, says where it is
    the others  find the note ─▶ reach rank 0 ─▶ "here I am" ─▶ learn on which network to talk

Where the launcher told rank 0's address there is no note. torchrun's own store is torch's matter.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from shardwise.errors import LaunchError
from shardwise.launch import ancestors, interface, notes, rendezvous
from shardwise.launch.identity import Identity
from shardwise.launch.notes import Note

POLL = 0.02
WARN = 60.0
"""Seconds after which rank 0 says for whom it waits."""

STARTING = 3.0
"""Seconds in which a launcher may still be starting the ranks beside rank 0."""

REACH = 5.0
"""Seconds for a connection to one of rank 0's addresses."""

INTERFACE = "GLOO_SOCKET_IFNAME"


def store(identity: Identity, timeout: float, place: str | None) -> Store:
    """The store of the run that `identity` belongs to; `timeout` in seconds.

    `place` is the setting `rendezvous`: HOST:PORT of rank 0, or a folder that all hosts share.
    Sets GLOO_SOCKET_IFNAME where it is not, to the interface over which all reach rank 0.
    Raises LaunchError where ranks do not find each other, naming those that are missing.
    """
    told = identity.launcher == "shardwise run" or place is None
    if identity.port is not None and told:
        return _tcp(identity, identity.address or "127.0.0.1", identity.port, timeout)
    if place is not None and os.sep not in place:
        host, _, port = place.rpartition(":")
        return _tcp(identity, host.strip("[]"), int(port), timeout)
    path = notes.path(identity, place)
    deadline = time.monotonic() + timeout
    met = (
        _receive(identity, path, deadline) if identity.rank == 0 else _go(identity, path, deadline)
    )
    met.set_timeout(timedelta(seconds=timeout))
    return met


def _tcp(identity: Identity, address: str, port: int, timeout: float) -> TCPStore:
    return TCPStore(
        address,
        port,
        identity.size,
        is_master=identity.rank == 0,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=identity.listen_fd,
    )


def _receive(identity: Identity, path: Path, deadline: float) -> TCPStore:
    """Rank 0's side: the store, when all others have come to it."""
    here = notes.addresses(identity)
    listening = _listen(identity)
    port = listening.getsockname()[1]
    hosted = TCPStore(
        "127.0.0.1",
        port,
        identity.size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=REACH),
        master_listen_fd=listening.detach(),
    )
    note = Note(addresses=here, port=port, host=socket.gethostname(), pid=os.getpid())
    hosted.set("run", path.name)
    with notes.left(path, note):
        _await_all(identity, hosted, path, deadline)
    seen = {hosted.get(_here(rank)).decode() for rank in range(1, identity.size)}
    address = min(seen, key=lambda one: ipaddress.ip_address(one).is_loopback, default="127.0.0.1")
    hosted.set("address", address)
    _choose_interface(address)
    return hosted


def _listen(identity: Identity) -> socket.socket:
    return rendezvous.listen("127.0.0.1", 0) if identity.on_one_host else notes.listen_everywhere()


def _await_all(identity: Identity, hosted: TCPStore, path: Path, deadline: float) -> None:
    warning = time.monotonic() + WARN
    beside = Beside(identity)
    missing = list(range(1, identity.size))
    while missing:
        if hosted.check([_here(missing[0])]):
            missing.pop(0)
            continue
        now, ended = time.monotonic(), beside.have_ended()
        if ended or now > min(deadline, warning):
            missing = [rank for rank in missing if not hosted.check([_here(rank)])]
            said = _missing(identity, missing, path, ended)
            if missing and (ended or now > deadline):
                raise LaunchError(said)
            print(f"shardwise: {said} Waiting on.", file=sys.stderr, flush=True)
            warning = deadline
        time.sleep(POLL)


class Beside:
    """Whether ranks beside this one have ended: mpiexec and srun may let the others wait."""

    def __init__(self, identity: Identity) -> None:
        self._size = identity.local_size
        self._launcher = ancestors.launcher() if sys.platform == "linux" else None
        self._fewer_since: float | None = None

    def have_ended(self) -> bool:
        """Whether fewer run than were to be started, and have for a while."""
        living = None if self._launcher is None else ancestors.living_children(self._launcher)
        if living is None or living >= self._size:
            self._fewer_since = None
            return False
        self._fewer_since = self._fewer_since or time.monotonic()
        return time.monotonic() > self._fewer_since + STARTING


def _missing(identity: Identity, missing: list[int], path: Path, ended: bool) -> str:
    ranks = ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))
    said = (
        f"{ranks} of the {identity.size} that {identity.launcher} started did not come to rank 0 "
        f"on {socket.gethostname()}."
    )
    if ended:
        return f"{said} A process beside rank 0 has ended: look for what it said."
    return (
        said if identity.on_one_host else f"{said} Do all hosts share {path.parent}?{_otherwise()}"
    )


def _otherwise() -> str:
    return (
        " If not, name a folder that they share, or rank 0's host and a port that is free there: "
        f"{notes.VARIABLE}=FOLDER/ or HOST:PORT."
    )


def _go(identity: Identity, path: Path, deadline: float) -> TCPStore:
    """The others' side: the store of rank 0, when all have come to it."""
    while time.monotonic() < deadline:
        note = notes.read(path)
        found = note and _join(identity, path, note)
        if found:
            _wait_for_all(identity, found, deadline)
            _choose_interface(found.get("address").decode())
            return found
        time.sleep(POLL)
    note = notes.read(path)
    what = (
        f"did not reach rank 0 at {' or '.join(note.addresses)}, port {note.port}"
        if note
        else f"found no note of rank 0 in {path.parent}"
    )
    raise LaunchError(
        f"Rank {identity.rank} of {identity.size}, started by {identity.launcher} on "
        f"{socket.gethostname()}, {what}. Did rank 0 start?"
        + ("" if identity.on_one_host else f" Do all hosts share {path.parent}?{_otherwise()}")
    )


def _join(identity: Identity, path: Path, note: Note) -> TCPStore | None:
    """The store that `note` speaks of, by the first address that leads to it."""
    for name in note.addresses:
        try:
            with socket.create_connection((name, note.port), timeout=REACH) as probe:
                address = probe.getpeername()[0].removeprefix("::ffff:")
            found = TCPStore(
                name,
                note.port,
                identity.size,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=REACH),
            )
            if found.check(["run"]) and found.get("run").decode() == path.name:
                found.set(_here(identity.rank), address)
                return found
        except (OSError, RuntimeError):  # this address leads nowhere; the next one may
            continue
    return None


def _wait_for_all(identity: Identity, found: TCPStore, deadline: float) -> None:
    left = max(1.0, deadline - time.monotonic())
    try:
        found.wait(["address"], timedelta(seconds=left))
    except RuntimeError:
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} came to rank 0, but rank 0 left or others "
            "did not come in time. Rank 0 names who is missing."
        ) from None


def _here(rank: int) -> str:
    return f"here/{rank}"


def _choose_interface(address: str) -> None:
    """Let Gloo talk on the network where rank 0 has `address`; the user's own choice stays."""
    if INTERFACE not in os.environ:
        name = interface.holding(interface.towards(address))
        if name is not None:
            os.environ[INTERFACE] = name
