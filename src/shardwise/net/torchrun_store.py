"""Lets ranks that torchrun started meet, on the store of its agent.

Whoever reaches that store can read and write it. So the secret of the run is not put there: on one
host rank 0 writes it to a file that only the same user can read, over several hosts the user gives
it. Without either the run is open, and says so.
"""

from __future__ import annotations

import os
import re
import secrets as tokens
import time
from datetime import timedelta
from pathlib import Path

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
"""Set to True where the agent has a store for the ranks."""

_FILE = re.compile("secret-[0-9a-f]{16}")


def has_store() -> bool:
    """Whether torchrun's agent has a store for its ranks; who only sets its variables has none."""
    return os.environ.get(AGENT) == "True"


def exposed() -> str:
    """The warning about torchrun's agent; "" without one, or where shardwise run has warned."""
    if not has_store() or FLAGS_VARIABLE in os.environ:
        return ""
    return (
        "torchrun's agent listens on all interfaces and believes who connects: whoever reaches it "
        "can run code as this user. docs/security.md says how to shut its port, and shardwise run "
        "-n N does without it."
    )


def meet(identity: Identity, timeout: float) -> Rendezvous:
    """Meet the other ranks on the agent's store; `timeout` in seconds. Raises LaunchError, naming
    those that are missing, and RuntimeError where the store cannot be reached."""
    limit = timedelta(seconds=timeout)
    found, _, _ = next(rendezvous("env://", timeout=limit))
    # It outlives a start of the ranks, and what they have left there.
    store = PrefixStore(f"start {os.environ.get(STARTS, 0)}", found)
    return _known(identity, store, timeout)


def _known(identity: Identity, store: Store, timeout: float) -> Rendezvous:
    """Wait until all have come to `store`, and agree on the secret."""
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
    """Meet on torch's default process group, which the script or a library of it has made before.

    Raises LaunchError where that is another one than the launcher's.
    """
    if (dist.get_rank(), dist.get_world_size()) != (identity.rank, identity.size):
        raise LaunchError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()} before sw.init, and {identity.launcher} started this process "
            f"as rank {identity.rank} of {identity.size}. Call sw.init first, and leave "
            "init_process_group out."
        )
    store = PrefixStore("shardwise", distributed_c10d._get_default_store())
    return _known(identity, store, timeout)


def _nothing() -> None:
    """Close nothing: the store is the agent's."""


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
            f"Rank {identity.rank} of {identity.size} waited {waited:.0f} s for {ranks}, which did "
            "not come to sw.init (--timeout). Look for what it said."
        ).blaming(missing) from None


def _by_file(identity: Identity, store: Store, limit: timedelta) -> str:
    """Hand the secret that rank 0 draws to all ranks in a file; the store has only its name."""
    if identity.rank == 0:
        name, drawn = f"secret-{tokens.token_hex(8)}", environment.draw_secret()
        place = private_files.folder() / name
        try:
            private_files.write(place, drawn)
            store.set("secret at", name)
            store.wait([_read(rank) for rank in range(1, identity.size)], limit)
        except OSError as error:
            raise LaunchError(
                f"Rank 0 cannot leave a file for the others in {place.parent}: {error.strerror}."
            ) from error
        finally:
            place.unlink(missing_ok=True)
            private_files.tidy()
        return drawn
    name = store.get("secret at").decode()
    found = private_files.read(_in_our_folder(name))
    if found is None:
        raise LaunchError(
            f"Rank {identity.rank} of {identity.size} finds no {name} of rank 0 in "
            f"{private_files.folder_path()}. Is TMPDIR alike on all ranks?"
        )
    store.set(_read(identity.rank), "")
    return found


def _in_our_folder(name: str) -> Path:
    """The path of a file whose name was read from the store, which others may write to."""
    if _FILE.fullmatch(name) is None:
        raise LaunchError(f"{name!r} is no name of rank 0's: others write on torchrun's store.")
    return private_files.folder() / name


def _read(rank: int) -> str:
    return f"read/{rank}"
