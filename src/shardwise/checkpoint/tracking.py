"""Saves and restores, by name, the states of objects that were passed to `engine.track`."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, optim

from shardwise.checkpoint import json_values
from shardwise.checkpoint.document import crc_of
from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.schema import is_plain_name
from shardwise.data.loader import Loader
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch, UsageError
from shardwise.world.current_batch import LoaderStream

_all: WeakSet[Tracking] = WeakSet()
"""The Tracking objects of all engines in this process."""


class Tracking:
    """The objects that an engine tracks, by name. See `trackable` for the supported types.

    If a checkpoint contains state for a name that is not tracked yet, the state is stored until an
    object is tracked under this name.
    """

    def __init__(self) -> None:
        self._tracked: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        _all.add(self)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track more objects, and restore any states that were loaded for their names earlier."""
        for name, value in objects.items():
            # Tracking the same object again must work, because a notebook cell may run twice.
            if name in self._objects and self._objects[name] is not value:
                raise UsageError(
                    f"engine.track already has an object named {name}. Use another name."
                )
            self._tracked[name], self._objects[name] = trackable(name, value), value
            if name in self._pending:
                _restore_state(name, self._tracked[name], self._pending.pop(name))

    # -- saving ---------------------------------------------------------------------------

    def states(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the state of every object.

        Returns:
            Two dicts. The first maps names to states: JSON if possible, otherwise a reference to a
            file. The second maps the names of these files to contents written by torch.save.

        Raises:
            CheckpointError: Loading a state would run code from the file.
        """
        fields: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for name, tracked in self._tracked.items():
            state = tracked.state_dict()
            try:
                fields[name] = json_values.encode(state)
            except json_values.NotPlain as error:
                fields[name] = {"$file": f"tracked-{name}.pt"}
                files[f"tracked-{name}.pt"] = _pickle(name, state, str(error))
        return fields, files

    def lacks_scheduler(self, optimizer: optim.Optimizer) -> bool:
        """Return whether an untracked learning-rate scheduler changes `optimizer`."""
        is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        # A scheduler that combines others (SequentialLR) may not refer to the optimizer itself.
        is_tracked = any(
            hasattr(each, "get_last_lr")
            and (getattr(each, "optimizer", optimizer) is optimizer or hasattr(each, "_schedulers"))
            for each in self._tracked.values()
        )
        return is_scheduled and not is_tracked

    def except_loaders(self) -> list[Any]:
        """Return the tracked objects except Loaders, which manage their positions themselves."""
        return [each for each in self._tracked.values() if not isinstance(each, Loader)]

    def describe_losses(
        self, optimizers: Iterable[optim.Optimizer], streams: Iterable[LoaderStream]
    ) -> Iterator[str]:
        """Yield a warning for each object whose state a save would lose."""
        yield from self.describe_untracked(optimizers, streams)
        for name in self._pending:
            yield (
                f"the loaded checkpoint has a state of {name}, which has not been tracked since, "
                f"so this save lacks it. Write engine.track({name}=...)."
            )

    def describe_untracked(
        self, optimizers: Iterable[optim.Optimizer], streams: Iterable[LoaderStream]
    ) -> Iterator[str]:
        """Yield a line for each scheduler and Loader that should be tracked, and is not."""
        for optimizer in optimizers:
            if self.lacks_scheduler(optimizer):
                yield (
                    f"a learning-rate scheduler of {type(optimizer).__name__} is not tracked, so "
                    "a resume restarts it. Write engine.track(scheduler=scheduler)."
                )
        # A Loader may be tracked by a different engine in this process, which then saves it.
        all_tracked = [each for tracking in _all for each in tracking._tracked.values()]
        names = {getattr(each, "name", None) for each in all_tracked}
        for stream in streams:
            if not stream.passing and stream.name not in names:
                yield (
                    f"{stream.name} is not tracked, so a resume restarts its data. Write "
                    "engine.track(loader=loader)."
                )

    # -- loading --------------------------------------------------------------------------

    def read(self, path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Read the states of tracked objects from the checkpoint at `path`.

        Args:
            fields: Fields of its checkpoint.json.

        Returns:
            The decoded states by name.

        Raises:
            BrokenCheckpoint: A file is damaged.
            CheckpointMismatch: The checkpoint has no state for a tracked object.
        """
        saved, sums = fields["tracked"], fields["files"]
        missing = sorted(set(self._tracked) - set(saved))
        if missing:
            raise CheckpointMismatch(
                f"{path} has no state of {', '.join(missing)}: the run that saved it tracked "
                f"{', '.join(sorted(saved)) or 'nothing'}. Track the same objects. To start these "
                "over and restore the rest, write engine.track after engine.resume or engine.load. "
                "To load only the model: engine.load(path, model_only=True)."
            )
        return {
            name: _unpickle(path, value["$file"], sums)
            if isinstance(value, dict) and set(value) == {"$file"}
            else json_values.decode(value)
            for name, value in saved.items()
        }

    def match_schedulers(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return a DeepSpeed checkpoint's scheduler states, keyed by the tracked schedulers' names.

        If there is exactly one state and one tracked scheduler, they match regardless of their
        names. Otherwise, the names are unchanged.
        """
        schedulers = [n for n, tracked in self._tracked.items() if hasattr(tracked, "get_last_lr")]
        if len(schedulers) == len(states) == 1:
            return {schedulers[0]: next(iter(states.values()))}
        return dict(states)

    def names_missing_from(self, states: Mapping[str, Any]) -> list[str]:
        """Return the names of tracked objects that have no entry in `states`."""
        return sorted(set(self._tracked) - set(states))

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states by name. Raises BrokenCheckpoint if an object rejects its state."""
        for name, state in states.items():
            if name in self._tracked:
                _restore_state(name, self._tracked[name], state)
            else:
                self._pending[name] = state


def _restore_state(name: str, tracked: Any, state: Any) -> None:
    """Restore the state of one object. Raises BrokenCheckpoint if the object rejects it."""
    try:
        tracked.load_state_dict(state)
    except UsageError:
        raise
    except Exception as error:  # a user's object may raise any exception
        raise BrokenCheckpoint(
            f"The {type(tracked).__name__} tracked as {name} rejects its state in the checkpoint "
            f"({type(error).__name__}: {error}). Track the object that was saved, or use another "
            "checkpoint."
        ) from error


def _pickle(name: str, state: Any, odd: str) -> bytes:
    """Serialise a state with torch.save. Raises CheckpointError if loading it would run code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    # Check this now. An error at the load would be too late, because the progress would be lost.
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise CheckpointError(
            f"The state of {name} contains {odd}. Reading {', '.join(unsafe)} could run code, "
            "which a checkpoint never does. Return only tensors, numbers, strings, and lists and "
            "dicts of these from its state_dict()."
        )
    return buffer.getvalue()


def _unpickle(path: Path, name: Any, sums: Mapping[str, str]) -> Any:
    """Load the file `name` in the checkpoint at `path`, after checking its CRC-32.

    Raises BrokenCheckpoint if the file is missing or damaged.
    """
    if not is_plain_name(name):
        raise BrokenCheckpoint(
            f"{path} names the file {name!r}, which is not a file in the same folder. Use another "
            "checkpoint."
        )
    try:
        data = read_whole(path / name)
        if name in sums and crc_of(data) != sums[name]:
            raise BrokenCheckpoint(
                f"{path / name} was changed after it was written: its CRC-32 is not {sums[name]}. "
                "Use another checkpoint."
            )
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except BrokenCheckpoint:
        raise
    except Exception as error:  # torch raises many exception types for truncated files
        raise BrokenCheckpoint(f"{path / name} cannot be read: {error!r:.300}.") from error


# -- objects without a state_dict ------------------------------------------------------------


@dataclass(frozen=True)
class _StateAdapter:
    """Adapter that gives an object `state_dict` and `load_state_dict`."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def state_dict(self) -> Any:
        return self.get()

    def load_state_dict(self, state: Any) -> None:
        self.set(state)


def trackable(name: str, value: Any) -> Any:
    """Return `value` if it has `state_dict` and `load_state_dict`, otherwise an adapter that does.

    Adapters exist for random generators (torch, numpy, random.Random), and for dicts, lists, deques
    and tensors, which are restored in place.

    Raises UsageError for any other object, for example a number, which cannot be changed in place.
    """
    if all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
        return value
    if isinstance(value, torch.Generator):
        return _StateAdapter(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        # The state is (version, words, gauss). `setstate` accepts only a tuple of words.
        return _StateAdapter(
            lambda: list(value.getstate()), lambda s: value.setstate((s[0], tuple(s[1]), s[2]))
        )
    if hasattr(value, "bit_generator"):  # a numpy Generator (numpy may not be installed)
        bits = value.bit_generator
        return _StateAdapter(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, dict):
        return _StateAdapter(lambda: dict(value), partial(_refill, value, value.update))
    if isinstance(value, list | deque):
        return _StateAdapter(lambda: list(value), partial(_refill, value, value.extend))
    if isinstance(value, Tensor):
        return _StateAdapter(value.detach, value.detach().copy_)
    raise UsageError(
        f"engine.track({name}=...) takes an object with state_dict() and load_state_dict(), a "
        f"generator, a dict, a list or a tensor, not {type(value).__name__}, because a load could "
        f"not restore it. Keep it in a dict: {name}s = {{...}}; engine.track({name}s={name}s)."
    )


def _refill(container: Any, fill: Callable[[Any], None], state: Any) -> None:
    container.clear()
    fill(state)
