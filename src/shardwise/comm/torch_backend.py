"""Helps the transports over torch.distributed: subgroups, complex buffers, errors in words."""

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

from shardwise.comm.base import Collectives, Cuts, GroupRanks, Handle, Solo, check_groups
from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import listeners
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import describe_wait


def interval(buffer: Tensor, cuts: Cuts, rank: int) -> Tensor:
    return buffer[cuts[rank] : cuts[rank + 1]]


def real_view(buffer: Tensor) -> Tensor:
    """View `buffer` as the backends take it: complex numbers travel as pairs of reals."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def gathered_rows(
    group: Collectives, row: Tensor, gather: Callable[[Tensor, Cuts], Handle]
) -> Tensor:
    """Gather one vector of each rank by the group's own all-gather: (k,) becomes (size, k)."""
    rows = row.new_empty((group.size, row.numel()))
    rows[group.rank] = row
    gather(rows.view(-1), [rank * row.numel() for rank in range(group.size + 1)]).wait()
    return rows


class _Placeholder:
    """Counts as a group where torch counts groups, so that the next group gets a fresh number."""


_highest = 0
"""The highest number that has been in the name of a group of this process."""


@contextmanager
def _fresh_name(group: Collectives) -> Iterator[None]:
    """Inside the block torch gives a group of ranks of `group` a name that none has had before.

    It names such groups by their ranks and the number of groups that a rank has now: a number that
    ranks need not have alike, and that comes again when groups are closed, while the store still
    tells where ranks could be reached for the one before. Collective.
    """
    global _highest
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    mine = torch.tensor([float(max(len(names), _highest + 1))], device=group.small_device)
    _highest = int(group.gather_rows(mine).max())
    extra = [_Placeholder() for _ in range(_highest - len(names))]
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
    """The group of `groups` that this rank is in; `make` is given its members, in order.

    All are places in `group_ranks`, the ranks of `group`, which is split. Without a `timeout`
    torch's own of half an hour bounds a wait.
    """
    rank = group.rank
    check_groups(groups, len(group_ranks.ranks))
    mine = sorted(next((members for members in groups if rank in members), [rank]))
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    made: dist.ProcessGroup | None = None
    if len(group_ranks.ranks) < dist.get_world_size():
        with _fresh_name(group):
            if len(mine) > 1:
                ranks = group_ranks.part(mine).of_torch
                made = dist.new_group(ranks, use_local_synchronization=True, **options)
    else:
        for members in groups:  # every rank takes part in making every group
            if len(members) > 1:
                found = dist.new_group(list(members), **options)
                made = found if rank in members else made
    listeners.shut()
    if len(mine) == 1:
        return Solo()
    assert isinstance(made, dist.ProcessGroup)
    return make(mine, made)


_GONE = ("closed by peer", "connection reset", "broken pipe", "connection refused", "eof")


def explained(
    error: RuntimeError, speaker: str, what: str, other: str | None = None
) -> CollectiveError:
    """Turn an error of the backend into the one that a user reads.

    `speaker` is this rank ("Rank 0 of 2"), `other` the one that it waited for, where known.
    """
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    first = re.sub(r"^\[.*?\] ", "", first).split(". ")[0].rstrip(".")
    if any(sign in str(error).lower() for sign in _GONE):
        return PeerLost(
            f"{speaker} lost {other or 'another rank'} in {what}: {first}. "
            "The cause is on the rank that went away; see its own output."
        )
    if is_timeout(error):
        whom = f"{other or 'a rank'}, which did not come: {first}."
        return CollectiveError(f"{speaker} waited in {what} for {whom} {ADVICE}")
    return CollectiveError(f"{speaker} failed in {what}: {first}.")


ADVICE = "Every rank must make the same calls; --timeout sets how long to wait."


def is_timeout(error: RuntimeError) -> bool:
    """Whether the backend failed because the time was over."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def timeout_error(
    status_server: StatusServer,
    speaker: str,
    call: str,
    missing: Collection[int],
    timeout: float = 0.0,
) -> CollectiveError:
    """The error of a rank that waited too long for the ranks `missing`.

    It names those that block them (watch/wait_graph.py).
    """
    blocking = status_server.blocking_ranks(missing)
    if (passed := status_server.error_of_another(speaker, blocking.abort)) is not None:
        return passed
    waited = f"waited {timeout:g} s" if timeout else "waited too long"
    error = CollectiveError(
        f"{speaker} {waited} in {call} for {describe_wait(missing, blocking)} {ADVICE}"
    )
    return error if blocking.is_circle else error.blaming(blocking.ranks)


def _in_forked_child() -> None:
    """Keep torch's groups until a forked child ends. Their destructors wait for threads that only
    the parent has, and crash."""
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_in_forked_child)
