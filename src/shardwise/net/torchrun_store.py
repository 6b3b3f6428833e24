"""Implements the rendezvous of ranks started by torchrun, on the store of torchrun's agent.

Anybody who can reach that store can read and write it, so it must not hold the run's secret. On a
single host, rank 0 writes the secret to a file that only the same user can read. On several hosts,
the user supplies the secret. If the user supplies none, anybody who can reach the store can join
the run, and rank 0 prints a warning.

With `--survive`, torchrun starts `shardwise run` once on each host instead. The store then only
holds the port of rank 0's command, and the reason if the run cannot start (see `HostStore`).
"""

from __future__ import annotations

import os
import re
import secrets as tokens
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shardwise.config import FLAGS_VARIABLE
from shardwise.errors import LaunchError
from shardwise.net import environment, private_files
from shardwise.net.identity import Identity
from shardwise.net.rendezvous import Rendezvous, here

STARTS = "TORCHELASTIC_RESTART_COUNT"
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torchrun sets to "True" if its agent provides a store."""

POLL = 0.5
"""Seconds between two looks at the keys of `HostStore`."""

_CONNECT = 60.0
"""Seconds within which the store must accept a connection. torchrun has already used it."""

_PORT, _FAILED, _STARTED = (f"shardwise run: {what}" for what in ("port", "failure", "started"))
_FILE = re.compile("secret-[0-9a-f]{16}")


def has_store() -> bool:
    """Return whether torchrun's agent provides a store for its ranks.

    Other launchers set torchrun's variables but provide no such store.
    """
    return os.environ.get(AGENT) == "True"


def exposed() -> str:
    """Return a warning that torchrun's agent accepts connections without authentication.

    Returns "" if there is no such agent, or if `shardwise run` has already printed the warning.
    """
    if not has_store() or FLAGS_VARIABLE in os.environ:
        return ""
    return (
        "torchrun's agent listens on all interfaces without authentication: anybody who reaches it "
        "can run code as this user. Close its port as in docs/security.md, or use shardwise run "
        "without torchrun (-n N, or -H on several hosts), which needs no such agent."
    )


def meet(identity: Identity, timeout: float) -> Rendezvous:
    """Connect to the other ranks through the agent's store, within `timeout` seconds.

    Raises LaunchError if some ranks do not register in time. The message names them. Raises
    RuntimeError if the store cannot be reached.
    """
    return _meet_on(_agent_store(timeout), identity, timeout)


def _agent_store(timeout: float) -> Store:
    found, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    # The store survives a restart of the ranks. The prefix hides the previous start's keys.
    return PrefixStore(f"start {os.environ.get(STARTS, 0)}", found)


class HostStore:
    """Connects the commands that torchrun has started on all hosts, with `--survive`.

        rank 0 listens             ─▶ its port      the other ranks connect to it
        a rank fails before that   ─▶ the reason    the others fail too
        all hosts have joined      ─▶ "started"     a command that starts later fails

    The store of a torchrun serves one start only, so that no rank uses the port of an earlier one.

    Args:
        identity: The rank of this command among those of all hosts.

    Raises:
        LaunchError: The store cannot be reached.
    """

    def __init__(self, identity: Identity) -> None:
        self.is_first = identity.rank == 0
        self._place = f"{identity.address}:{identity.port}"
        try:
            self._store = _agent_store(_CONNECT)
        except RuntimeError as error:
            raise LaunchError(
                f"This host cannot connect to torchrun's store at {self._place} (MASTER_ADDR, "
                f"MASTER_PORT): {error}"
            ) from None

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Send an error to the other hosts, which would wait for this one otherwise."""
        try:
            yield
        except BaseException as error:
            reason = f"{socket.gethostname()}: {str(error) or type(error).__name__}"
            with suppress(RuntimeError):  # torchrun has ended
                self._store.compare_set(_FAILED, "", reason)  # keeps an earlier reason
            if self.is_first:
                time.sleep(2 * POLL)  # until the others have read it: the store ends with torchrun
            raise

    def check(self) -> None:
        """Raise LaunchError if the run has started without this host, or cannot start."""
        if self._read(_STARTED) is not None:
            raise _started_before()
        if (reason := self._read(_FAILED)) is not None:
            raise LaunchError(f"The run cannot start, because a host has failed. {reason[:1000]}")

    def publish(self, port: int) -> None:
        """Send the port of rank 0, which listens, to the other ranks."""
        self.check()
        if self._read(_PORT) is not None:
            raise _started_before()
        self._store.set(_PORT, str(port))

    def mark_started(self) -> None:
        self._store.set(_STARTED, "1")

    def port(self, seconds: float) -> int:
        """Return the port of rank 0. Raises LaunchError if it sends none within `seconds`."""
        until = time.monotonic() + seconds
        while (text := self._read(_PORT)) is None:
            self.check()
            if time.monotonic() > until:
                raise LaunchError(
                    f"The command of rank 0 has not sent its port through torchrun's store at "
                    f"{self._place} within {seconds:g} s. Look for an error in its output."
                )
            time.sleep(POLL)
        self.check()
        # Anybody can write to the store.
        if re.fullmatch("[0-9]{1,5}", text) is None:
            raise _foreign(text)
        return int(text)

    def _read(self, key: str) -> str | None:
        try:
            return (
                self._store.get(key).decode(errors="replace") if self._store.check([key]) else None
            )
        except RuntimeError:
            raise LaunchError(
                f"torchrun's store at {self._place} has ended. Look for an error in the output of "
                "torchrun on that host."
            ) from None


def _started_before() -> LaunchError:
    return LaunchError(
        "This run has already started, and a lost host cannot join it again. To start the run "
        "again, start torchrun again on all hosts."
    )


def _foreign(text: str) -> LaunchError:
    return LaunchError(
        f"{text[:40]!r} was not written by rank 0: another program writes to torchrun's store."
    )


def _meet_on(store: Store, identity: Identity, timeout: float) -> Rendezvous:
    """Wait until all ranks have registered on `store`, then agree on the secret."""
    limit = timedelta(seconds=timeout)
    store.set(here(identity.rank), "")
    _await_all(identity, store, timeout)
    given = environment.given_secret(os.environ)
    if given is not None or identity.size == 1:
        return Rendezvous(store, (given or environment.draw_secret()).encode(), False, _nothing)
    if identity.on_one_host:
        return Rendezvous(store, _by_file(identity, store, limit).encode(), False, _nothing)
    if identity.rank == 0:
        store.set("secret", environment.draw_secret())
    return Rendezvous(store, store.get("secret"), True, _nothing)


def adopt(identity: Identity, timeout: float) -> Rendezvous:
    """Connect to the other ranks through torch's default process group.

    The script must have initialised this group before it calls sw.init. Raises LaunchError if the
    group's rank and size differ from the launcher's.
    """
    if (dist.get_rank(), dist.get_world_size()) != (identity.rank, identity.size):
        raise LaunchError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()} before sw.init, and {identity.launcher} started this process "
            f"as rank {identity.rank} of {identity.size}. Call sw.init first, and leave "
            "init_process_group out."
        )
    store = PrefixStore("shardwise", distributed_c10d._get_default_store())
    return _meet_on(store, identity, timeout)


def _nothing() -> None:
    """Do nothing, because the store belongs to the agent."""


def _await_all(identity: Identity, store: Store, timeout: float) -> None:
    keys = [here(rank) for rank in range(identity.size)]
    began = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        waited = time.monotonic() - began
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} waited {waited:.0f} s (--timeout) for "
            f"{ranks} to call sw.init. Look for an error in the output of {ranks}."
        ).blaming(missing) from None


def _by_file(identity: Identity, store: Store, limit: timedelta) -> str:
    """Pass rank 0's new secret to all ranks in a file. The store holds only the file's name."""
    if identity.rank == 0:
        name, secret = f"secret-{tokens.token_hex(8)}", environment.draw_secret()
        place = private_files.folder() / name
        try:
            private_files.write(place, secret)
            store.set("secret at", name)
            store.wait([_read(rank) for rank in range(1, identity.size)], limit)
        except OSError as error:
            raise LaunchError(
                f"Rank 0 cannot write a file for the other ranks in {place.parent}: "
                f"{error.strerror}."
            ) from error
        finally:
            place.unlink(missing_ok=True)
            private_files.tidy()
        return secret
    name = store.get("secret at").decode()
    # Anybody can write to the store, so reject a `name` that points to another folder.
    if _FILE.fullmatch(name) is None:
        raise _foreign(name)
    found = private_files.read(private_files.folder() / name)
    if found is None:
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} cannot find rank 0's file {name} in "
            f"{private_files.folder_path()}. Set the same TMPDIR on all ranks."
        )
    store.set(_read(identity.rank), "")
    return found


def _read(rank: int) -> str:
    return f"read/{rank}"
