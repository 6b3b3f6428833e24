"""Writes files on the main rank for all ranks. If writing fails, all ranks raise the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.file_system import replace_file
from shardwise.errors import CheckpointNotWritten, ShardwiseError


class SchedulesFile:
    """A placeholder for the schedules in an engine's checkpoint. The library saves the real ones.

    `file` is the name of the library's file, which the checkpoint records to identify it.
    """

    def __init__(self) -> None:
        self.file: str | None = None

    def get_last_lr(self) -> list[float]:
        """Return an empty list of learning rates.

        The engine identifies schedulers by this method.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the file's name, or an empty one if no name is set."""
        return {} if self.file is None else {"file": self.file}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No-op: the library loads its own file."""


def on_main(
    world: sw.World, folder: Path, action: Callable[[], None], *, in_trial: bool = False
) -> None:
    """Run `action`, which writes into `folder`, on the main rank only. Collective.

    With `--trial`, `action` runs only if `in_trial` is true. If it fails, all ranks raise its
    error. An error that is not a ShardwiseError, such as a full disk, is raised as
    CheckpointNotWritten.
    """
    if world.settings.trial and not in_trial:
        return
    fault: ShardwiseError | None = None
    if world.is_main:
        try:
            action()
        except ShardwiseError as error:
            fault = error
        except OSError as error:
            fault = CheckpointNotWritten(
                f"{folder} cannot be written: {error.strerror or error}. Earlier checkpoints are "
                "intact. Make room, or choose a writable folder, and save again."
            )
        except Exception as error:
            fault = CheckpointNotWritten(
                f"{folder} cannot be written: {type(error).__name__}: {error}. Earlier checkpoints "
                "are intact."
            )
    # The other ranks wait here. If only the main rank raised its error, they would wait forever.
    if (fault := world.broadcast_object(fault)) is not None:
        raise fault


def write(path: Path, data: bytes) -> None:
    """Atomically write `data` to a file at `path`, creating its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def copied_state(
    state: Mapping[str, Any], device: torch.device | str | None = None
) -> dict[str, Any]:
    """Return a copy of `state` that shares no memory with it. If `device` is set, copy to it.

    Tied weights remain a single tensor.
    """
    # Parameters are views of one flat buffer. Without a copy, writers would save the entire buffer,
    # or treat all parameters as tied.
    copies: dict[Any, Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            key = place if value.numel() else name
            if key not in copies:
                copies[key] = (
                    value.detach().clone()
                    if device is None
                    else value.detach().to(device, copy=True)
                )
            value = copies[key]
        found[name] = value
    return found
