"""What is said of an operation for which some ranks do not ask."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardwise.horovod.requests import Request
from shardwise.watch.status_server import StatusServer
from shardwise.watch.wait_graph import RankStatus, named


def warn(
    request: Request,
    missing: Sequence[int],
    seconds: float,
    timeout: float,
    status_server: StatusServer,
) -> None:
    """Say on stderr which ranks are missing, and where they are instead."""
    lines = [
        f"shardwise: {request.kind} {request.name!r} has waited {seconds:g} s for "
        f"{named(missing)}. It fails after {timeout:g} s (--timeout)."
    ]
    for rank, found in sorted(status_server.ask(list(missing), stack=True).items()):
        if isinstance(found, RankStatus):
            lines.append(f"  rank {rank} is {found.place}")
            lines += [f"    {frame}" for frame in found.stack]
        else:
            lines.append(f"  rank {rank} {found}")
    if sys.__stderr__ is not None:
        sys.__stderr__.write("\n".join(lines) + "\n")
        sys.__stderr__.flush()
