"""State of the objects passed to `engine.track`, saved and loaded under their names."""

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
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch, UsageError
from shardwise.world.current_batch import LoaderStream

_all: WeakSet[Tracking] = WeakSet()
"""The Tracking of every engine in this process."""


class Tracking:
    """Objects with a state, by name; see `trackable`.

    If a load finds a state for a name that is not tracked yet, it is kept until the name is.
    """

    def __init__(self) -> None:
        self._tracked: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        _all.add(self)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track `objects` too, and restore any states that were loaded for them earlier."""
        for name, value in objects.items():
            # Tracking the same object again is harmless, for example in a notebook cell that runs
            # twice.
            if name in self._objects and self._objects[name] is not value:
                raise UsageError(
                    f"engine.track already has an object named {name}. Use another name."
                )
            self._tracked[name], self._objects[name] = trackable(name, value), value
            if name in self._pending:
                _restore_state(name, self._tracked[name], self._pending.pop(name))

    # -- saving ---------------------------------------------------------------------------

    def states(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the states as JSON, and files of torch.save for those with larger tensors.

        Raises CheckpointError for a state that could only be read by running code.
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

    def describe_losses(
        self, optimizers: Iterable[optim.Optimizer], streams: Iterable[LoaderStream]
    ) -> Iterator[str]:
        """Yield a warning for each object whose state a resume would lose."""
        known = list(self._tracked.values())
        for optimizer in optimizers:
            is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            # A scheduler of schedulers (SequentialLR) may store the optimizer only in its parts.
            is_tracked = any(
                hasattr(each, "get_last_lr")
                and (
                    getattr(each, "optimizer", optimizer) is optimizer
                    or hasattr(each, "_schedulers")
                )
                for each in known
            )
            if is_scheduled and not is_tracked:
                yield (
                    f"a learning-rate scheduler of {type(optimizer).__name__} is not tracked, so "
                    "a resume would restart it. Write engine.track(scheduler=scheduler)."
                )
        # A Loader that any engine of this process tracks is saved with that engine.
        all_tracked = [each for tracking in _all for each in tracking._tracked.values()]
        names = {getattr(each, "name", None) for each in all_tracked}
        for stream in streams:
            if not stream.passing and stream.name not in names:
                yield (
                    f"{stream.name} is not tracked, so a resume would restart its data. Write "
                    "engine.track(loader=loader)."
                )
        for name in self._pending:
            yield (
                f"the loaded checkpoint has a state of {name}, which has not been tracked since, "
                f"so this save lacks it. Write engine.track({name}=...)."
            )

    # -- loading --------------------------------------------------------------------------

    def read(self, path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states in the checkpoint `path`, whose JSON has `fields`.

        Raises BrokenCheckpoint if a file is damaged, CheckpointMismatch if a tracked object has no
        saved state.
        """
        saved, sums = fields["tracked"], fields["files"]
        missing = sorted(set(self._tracked) - set(saved))
        if missing:
            raise CheckpointMismatch(
                f"{path} has no state of {', '.join(missing)}, which engine.track has; it has "
                f"{', '.join(sorted(saved)) or 'nothing tracked'}. Track the same objects, or load "
                "only the model: engine.load(path, model_only=True)."
            )
        return {
            name: _unpickle(path, value["$file"], sums)
            if isinstance(value, dict) and set(value) == {"$file"}
            else json_values.decode(value)
            for name, value in saved.items()
        }

    def match_schedulers(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return scheduler states of another library, under the names used here.

        If there is one state and one tracked scheduler, they belong together. Otherwise names
        decide.
        """
        schedulers = [n for n, tracked in self._tracked.items() if hasattr(tracked, "get_last_lr")]
        if len(schedulers) == len(states) == 1:
            return {schedulers[0]: next(iter(states.values()))}
        return dict(states)

    def names_missing_from(self, states: Mapping[str, Any]) -> list[str]:
        """Return the tracked names that `states` lacks."""
        return sorted(set(self._tracked) - set(states))

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the state of each object. Raises BrokenCheckpoint if an object rejects it."""
        for name, state in states.items():
            if name in self._tracked:
                _restore_state(name, self._tracked[name], state)
            else:
                self._pending[name] = state


def _restore_state(name: str, tracked: Any, state: Any) -> None:
    """Restore one state. Raises BrokenCheckpoint if `tracked` rejects it."""
    try:
        tracked.load_state_dict(state)
    except UsageError:
        raise
    except Exception as error:  # a user's object may raise anything
        raise BrokenCheckpoint(
            f"The {type(tracked).__name__} tracked as {name} rejects its state in the checkpoint "
            f"({type(error).__name__}: {error}). Track the object that was saved, or use another "
            "checkpoint."
        ) from error


def _pickle(name: str, state: Any, odd: str) -> bytes:
    """Serialize a state with torch.save. Raises CheckpointError if reading it would run code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    # Checked at the save: at the load it would be too late, because the training would be lost.
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise CheckpointError(
            f"The state of {name} contains {odd}. Reading {', '.join(unsafe)} could run code, "
            "which a checkpoint never does. Return only tensors, numbers, text, and lists and "
            "maps of those from its state_dict()."
        )
    return buffer.getvalue()


def _unpickle(path: Path, name: Any, sums: Mapping[str, str]) -> Any:
    """Return the contents of file `name` in the checkpoint `path`, after a check of its CRC-32."""
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
    except Exception as error:  # torch raises many types for a truncated file
        raise BrokenCheckpoint(f"{path / name} cannot be read: {error!r:.300}.") from error


# -- objects without a state_dict ------------------------------------------------------------


@dataclass(frozen=True)
class _StateAdapter:
    """Adds `state_dict` and `load_state_dict` to an object."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def state_dict(self) -> Any:
        return self.get()

    def load_state_dict(self, state: Any) -> None:
        self.set(state)


def trackable(name: str, value: Any) -> Any:
    """Return `value`, or an adapter that adds `state_dict` and `load_state_dict`.

    Adapters exist for random generators (torch, numpy, random.Random), and for dicts, lists, deques
    and tensors, which are filled in place.

    Raises UsageError for other objects. A number, for example, cannot be changed in place.
    """
    if all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
        return value
    if isinstance(value, torch.Generator):
        return _StateAdapter(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        # The state is (version, words, gauss). JSON turns its tuples into lists.
        return _StateAdapter(
            lambda: list(value.getstate()), lambda s: value.setstate((s[0], tuple(s[1]), s[2]))
        )
    if hasattr(value, "bit_generator"):  # a numpy Generator; numpy may not be imported
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
