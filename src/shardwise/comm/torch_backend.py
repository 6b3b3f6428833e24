"""Helpers for transports over torch.distributed: subgroups, complex buffers, error messages."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.base import Collectives, GroupRanks, Solo, check_groups
from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import listeners
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import describe_wait


def real_view(buffer: Tensor) -> Tensor:
    """View complex numbers as pairs of reals, because the backends cannot sum complex numbers."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


_highest = 0
"""Highest number used so far in the names of this process's groups."""


@contextmanager
def _fresh_name(group: Collectives) -> Iterator[None]:
    """Context manager in which torch uses a new name for a process group. Collective."""
    # torch names such a group by its ranks and by the current number of groups on this rank. That
    # number may differ between ranks. It also repeats after groups are closed, and then the store
    # would return the ranks' old addresses. So all ranks agree on a higher number, and add
    # placeholder groups up to it.
    global _highest
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    mine = torch.tensor([float(max(len(names), _highest + 1))], device=group.small_device)
    _highest = int(group.gather_rows(mine).max())
    extra = [object() for _ in range(_highest - len(names))]
    names.update((each, f"placeholder {number}") for number, each in enumerate(extra))
    try:
        yield
    finally:
        for each in extra:
            del names[each]


def split_group(
    group: Collectives,
    group_ranks: GroupRanks,
    groups: Sequence[Sequence[int]],
    backend: str,
    make: Callable[[Sequence[int], dist.ProcessGroup], Collectives],
    timeout: timedelta | None = None,
) -> Collectives:
    """Return the group in `groups` that contains this rank, or `Solo` if none does. Collective.

    `make` creates the transport from the new group's members (indices into `group_ranks`, in
    ascending order) and torch's process group. If `timeout` is None, waits are limited to torch's
    default of 30 minutes.
    """
    rank = group.rank
    check_groups(groups, len(group_ranks.ranks))
    mine = sorted(next((members for members in groups if rank in members), [rank]))
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    made: dist.ProcessGroup | None = None
    world = dist.distributed_c10d._world
    known = set(world.pg_map)
    try:
        if len(group_ranks.ranks) < dist.get_world_size():
            # torch's default group has more ranks than this group, and those do not make this call.
            # So only the members create their group.
            with _fresh_name(group):
                if len(mine) > 1:
                    ranks = group_ranks.part(mine).of_torch
                    made = dist.new_group(ranks, use_local_synchronization=True, **options)
        else:
            for members in groups:  # torch requires that every rank creates every group
                if len(members) > 1:
                    found = dist.new_group(list(members), **options)
                    made = found if rank in members else made
    except RuntimeError as error:
        # Other ranks may wait for this one in these groups. They notice that it has closed them.
        for each in set(world.pg_map) - known:
            if "gloo" in backend:  # it may be one of several, by device type
                each._get_backend(torch.device("cpu")).abort()
            dist.destroy_process_group(each)
        raise explain(error, group_ranks.speaker(rank), "connecting a group") from error
    # Every member is connected now, so an open listener would only accept strangers.
    listeners.shut()
    if len(mine) == 1:
        return Solo()
    assert isinstance(made, dist.ProcessGroup)
    return make(mine, made)


_GONE = (
    "is gone",
    "closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "eof",
)


def explain(
    error: RuntimeError, speaker: str, what: str, other: str | None = None
) -> CollectiveError:
    """Convert a backend error into the error that the user sees.

    `speaker` is this rank ("Rank 0 of 2"), and `what` the collective. `other` is the rank that this
    rank waited for, if known.
    """
    # Backends raise RuntimeError for everything, so only the text distinguishes the cases.
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    first = re.sub(r"^\[.*?\] ", "", first).split(". ")[0].rstrip(".")
    if any(sign in str(error).lower() for sign in _GONE):
        return PeerLost(
            f"{speaker} lost {other or 'another rank'} in {what}: {first}. "
            "The cause is on the rank that ended: see its output."
        )
    if is_timeout(error):
        whom = f"{other or 'a rank'}, which did not arrive: {first}."
        return CollectiveError(f"{speaker} waited in {what} for {whom} {ADVICE}")
    return CollectiveError(f"{speaker} failed in {what}: {first}.")


ADVICE = "Every rank must make the same calls; --timeout sets how long to wait."


def is_timeout(error: RuntimeError) -> bool:
    """Return whether the backend failed because of a timeout."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def timeout_error(
    status_server: StatusServer,
    speaker: str,
    call: str,
    missing: Collection[int],
    timeout: float = 0.0,
) -> CollectiveError:
    """Return the error for a rank that waited too long for the ranks `missing`.

    The error names the ranks that block the missing ones (see watch/wait_graph.py).
    """
    # If a rank aborted meanwhile, its error is the cause and this timeout only a consequence.
    blocking = status_server.blocking_ranks(missing)
    if (passed := status_server.error_of_another(speaker, blocking.abort)) is not None:
        return passed
    waited = f"waited {timeout:g} s" if timeout else "waited too long"
    error = CollectiveError(
        f"{speaker} {waited} in {call} for {describe_wait(missing, blocking)} {ADVICE}"
    )
    return error if blocking.is_circle else error.blaming(blocking.ranks)


def _in_forked_child() -> None:
    # The destructors of torch's groups wait for threads that exist only in the parent, and crash.
    # So the child holds a reference to each group and never destroys it.
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_in_forked_child)
