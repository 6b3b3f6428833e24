"""Files that the main worker writes for all: what goes wrong there is raised on every worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.errors import CheckpointNotWritten, ShardwiseError


class KeptBeside:
    """Tells an engine that schedules are saved, which its library does in a file of its own.

    `file` is that file's name, so that a checkpoint says itself which one belongs to it.
    """

    def __init__(self) -> None:
        self.file: str | None = None

    def get_last_lr(self) -> list[float]:
        """As a scheduler has it."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The name of the file, where there is one."""
        return {} if self.file is None else {"file": self.file}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: it is read where it is kept."""


def on_main(world: sw.World, folder: Path, action: Callable[[], None]) -> None:
    """Run `action`, which writes into `folder`, on the main worker alone; nowhere with `--trial`.
    Collective. Raises on all workers what it raises: CheckpointNotWritten for what is no error of
    Shardwise, such as a disk that refuses."""
    if not world.settings.trial:
        also_in_trial(world, folder, action)


def also_in_trial(world: sw.World, folder: Path, action: Callable[[], None]) -> None:
    """Do what `on_main` does, with `--trial` too."""
    fault: ShardwiseError | None = None
    if world.is_main:
        try:
            action()
        except Exception as error:
            fault = error if isinstance(error, ShardwiseError) else _not_written(folder, error)
    if (fault := world.broadcast_object(fault)) is not None:
        raise fault


def _not_written(folder: Path, error: Exception) -> CheckpointNotWritten:
    if isinstance(error, OSError):
        return CheckpointNotWritten(
            f"{folder} cannot be written: {error.strerror or error}. Checkpoints before this one "
            "are whole: give a folder that can be written, or make room, and save again."
        )
    return CheckpointNotWritten(
        f"{folder} cannot be written: {type(error).__name__}: {error}. Checkpoints before this one "
        "are whole."
    )
