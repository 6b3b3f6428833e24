"""What the transports share: buffers as backends take them, subgroups, errors in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.base import Collectives, Cuts, Solo, check_groups
from shardwise.errors import CollectiveError, PeerLost


def interval(buffer: Tensor, cuts: Cuts, rank: int) -> Tensor:
    return buffer[cuts[rank] : cuts[rank + 1]]


def wire(buffer: Tensor) -> Tensor:
    """`buffer` as the backends take it: complex numbers travel as pairs of reals."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def widened(buffer: Tensor, exact_sum: bool) -> Tensor:
    narrow = buffer.dtype in (torch.bfloat16, torch.float16)
    return buffer.float() if narrow and exact_sum else buffer


def split(
    rank: int,
    size: int,
    groups: Sequence[Sequence[int]],
    backend: str,
    make: Callable[[int, int, dist.ProcessGroup], Collectives],
) -> Collectives:
    """Every rank takes part in making every group, and gets its own."""
    check_groups(groups, size)
    mine: Collectives = Solo()
    for members in groups:
        made = dist.new_group(list(members), backend=backend)
        if rank in members and len(members) > 1:
            assert isinstance(made, dist.ProcessGroup)
            mine = make(sorted(members).index(rank), len(members), made)
    return mine


_GONE = ("closed by peer", "connection reset", "broken pipe", "connection refused", "eof")


def explain(error: RuntimeError, rank: int, size: int, what: str) -> CollectiveError:
    """The error that a user reads when the transport gives up."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    first = re.sub(r"^\[.*?\] ", "", first).split(". ")[0].rstrip(".")
    if any(sign in str(error).lower() for sign in _GONE):
        return PeerLost(
            f"Rank {rank} of {size} lost another rank in {what}: {first}. "
            "The cause is on the rank that went away; see its own output."
        )
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return CollectiveError(
            f"Rank {rank} of {size} waited in {what} for a rank that did not come: {first}. "
            "Every rank must make the same calls; --timeout sets how long to wait."
        )
    return CollectiveError(f"Rank {rank} of {size} failed in {what}: {first}.")
