"""A timeline that a script starts and stops itself; HOROVOD_TIMELINE starts one without it."""

from __future__ import annotations

import os
import warnings

from shardwise.world import start_timeline as start
from shardwise.world import stop_timeline as stop


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what all ranks do into `file_path` from now on, as Chrome trace JSON.

    To be called by every rank. Raises ConfigError where it cannot be written. Operations are not
    begun in cycles here, so there are none to mark: asked for, that is said.
    """
    if mark_cycles:
        warnings.warn(
            "hvd.start_timeline: mark_cycles marks nothing. An operation begins as soon as all "
            "ranks have asked for it, not in cycles.",
            stacklevel=2,
        )
    start(file_path)


def stop_timeline() -> None:
    """Write what is left of the timeline, and record no longer."""
    stop()
