"""Files that the main worker writes for all: what goes wrong there is raised on every worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import shardwise as sw
from shardwise.errors import CheckpointNotWritten


def on_main(world: sw.World, folder: Path, action: Callable[[], None]) -> None:
    """Run `action`, which writes into `folder`, on the main worker alone; nowhere with `--trial`.
    Collective. Raises CheckpointNotWritten on all workers where the disk refuses."""
    fault: CheckpointNotWritten | None = None
    if world.is_main and not world.settings.trial:
        try:
            action()
        except OSError as error:
            why = error.strerror or error
            fault = CheckpointNotWritten(
                f"{folder} cannot be written: {why}. Checkpoints before this one are whole: give "
                "a folder that can be written, or make room, and save again."
            )
    if (fault := world.broadcast_object(fault)) is not None:
        raise fault


def write(path: Path, data: bytes) -> None:
    """Put a file with `data` at `path`, whole or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
