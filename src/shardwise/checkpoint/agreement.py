"""Raises one rank's error on every rank, so that no rank waits forever for the failed one."""

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
    """Raise `kind` on every rank if any rank passes a `failure` message. Collective."""
    # Every rank raises the message of the lowest failing rank, so all messages are identical.
    for rank, message in enumerate(group.gather_objects(failure)):
        if message is not None:
            raise kind(message if group.size == 1 else f"Rank {rank}: {message}")


def read_on_all(group: Collectives, path: Path, read: Callable[[], T]) -> T:
    """Call `read` on every rank, and return its result if all calls succeed. Collective.

    If any call fails, every rank raises the same error: the error of one of the failed calls.
    BrokenCheckpoint takes precedence over CheckpointMismatch, because a damaged file may look like
    the file of a different model.
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
                # If all ranks have the same error, its cause is the file: do not name a rank.
                known = all(other == rank_failure for other in failures)
                raise kind(rank_failure[1] if known else f"Rank {rank}: {rank_failure[1]}")
    assert result is not None
    return result
