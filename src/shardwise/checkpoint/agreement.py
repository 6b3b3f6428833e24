"""Error agreement: raises the error of one rank on all ranks, so that no rank waits forever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardwise.comm import Collectives
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

T = TypeVar("T")


def agree(
    group: Collectives, failure: str | None, kind: type[CheckpointError] = CheckpointError
) -> None:
    """Raise `kind` on all ranks if one has a `failure`. Collective."""
    # The first failing rank decides, so that all ranks raise the same message.
    for rank, message in enumerate(group.gather_objects(failure)):
        if message is not None:
            raise kind(message if group.size == 1 else f"Rank {rank}: {message}")


def read_on_all(group: Collectives, path: Path, read: Callable[[], T]) -> T:
    """Return the result of `read` once it has succeeded on all ranks. Collective.

    If a rank fails, raises its error on all ranks. BrokenCheckpoint takes precedence over
    CheckpointMismatch, because a damaged file may look like a file of another model.
    """
    result, failure = None, None
    try:
        result = read()
    except CheckpointError as error:
        failure = type(error).__name__, str(error)
    except OSError as error:
        failure = BrokenCheckpoint.__name__, f"{path} cannot be read: {error}."
    failures = group.gather_objects(failure)
    # All ranks see the same list in the same order, so all of them raise the same error.
    for kind in (BrokenCheckpoint, CheckpointMismatch, CheckpointError):
        for rank, rank_failure in enumerate(failures):
            if rank_failure is not None and rank_failure[0] == kind.__name__:
                # The same error on every rank is about the file: naming one rank would mislead.
                known = all(other == rank_failure for other in failures)
                raise kind(rank_failure[1] if known else f"Rank {rank}: {rank_failure[1]}")
    assert result is not None
    return result
