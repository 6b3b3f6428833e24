"""Saves and loads the objects that `engine.track` was given, each under its name."""

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
from shardwise.checkpoint.schema import plain_name
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch, UsageError
from shardwise.world.current_batch import LoaderStream

_all: WeakSet[Tracking] = WeakSet()
"""What the engines of this process track."""


class Tracking:
    """Objects that have a state, by name: see `trackable`.

    A state that was loaded for an object that is not here yet waits for it.
    """

    def __init__(self) -> None:
        self._tracked: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        _all.add(self)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track `objects` too; a state that was loaded before is theirs now."""
        for name, each in objects.items():
            if name in self._given and self._given[name] is not each:
                raise UsageError(f"{name} is tracked already: give each object a name of its own.")
            self._tracked[name], self._given[name] = trackable(name, each), each
            if name in self._pending:
                _give(name, self._tracked[name], self._pending.pop(name))

    # -- saving ---------------------------------------------------------------------------

    def states(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Their states: as JSON, and as files of torch.save where they hold larger tensors.

        Raises CheckpointError for a state that only running code could read.
        """
        fields: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for name, each in self._tracked.items():
            state = each.state_dict()
            try:
                fields[name] = json_values.encode(state)
            except json_values.NotPlain as error:
                fields[name] = {"$file": f"tracked-{name}.pt"}
                files[f"tracked-{name}.pt"] = _pickled(name, state, str(error))
        return fields, files

    def lacks(
        self, optimizers: Iterable[optim.Optimizer], streams: Iterable[LoaderStream]
    ) -> Iterator[str]:
        """In words, what a resume from a save of now would start anew."""
        known = list(self._tracked.values())
        for optimizer in optimizers:
            scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            # A scheduler of schedulers may keep the optimizer in its parts only.
            tracked = any(
                hasattr(each, "get_last_lr")
                and (
                    getattr(each, "optimizer", optimizer) is optimizer
                    or hasattr(each, "_schedulers")
                )
                for each in known
            )
            if scheduled and not tracked:
                yield (
                    f"a learning-rate scheduler acts on {type(optimizer).__name__} and is not "
                    "tracked: a resume would start it anew. Write "
                    "engine.track(scheduler=scheduler)."
                )
        everyones = [each for tracking in _all for each in tracking._tracked.values()]
        names = {getattr(each, "name", None) for each in everyones}
        for stream in streams:
            if not stream.passing and stream.name not in names:
                yield (
                    f"{stream.name} is not tracked: a resume would begin its data anew. Write "
                    "engine.track(loader=loader)."
                )
        for name in self._pending:
            yield (
                f"the checkpoint that was loaded has the state of {name}, which was not tracked "
                f"since: this one is without. Write engine.track({name}=...)."
            )

    # -- loading --------------------------------------------------------------------------

    def read(self, path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The states in the checkpoint `path`, whose JSON has `fields`.

        Raises BrokenCheckpoint for one that is not whole, CheckpointMismatch where an object that
        is tracked here has none.
        """
        saved, sums = fields["tracked"], fields["files"]
        missing = sorted(set(self._tracked) - set(saved))
        if missing:
            raise CheckpointMismatch(
                f"{path} has no state of {', '.join(missing)}, which engine.track was given: it "
                f"has {', '.join(sorted(saved)) or 'nothing tracked'}. Load the model alone "
                "(engine.load(path, model_only=True)), or track the same objects."
            )
        return {
            name: _unpickled(path, value["$file"], sums)
            if isinstance(value, dict) and set(value) == {"$file"}
            else json_values.decode(value)
            for name, value in saved.items()
        }

    def matched(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """`states` that another library saved, of schedulers, by the names that these have here: a
        state goes to the only scheduler that is tracked, else to the name that it has."""
        schedulers = [n for n, each in self._tracked.items() if hasattr(each, "get_last_lr")]
        if len(schedulers) == len(states) == 1:
            return {schedulers[0]: next(iter(states.values()))}
        return dict(states)

    def left_out(self, states: Mapping[str, Any]) -> list[str]:
        """The names of what is tracked and has none of `states`."""
        return sorted(set(self._tracked) - set(states))

    def give(self, states: Mapping[str, Any]) -> None:
        """Let each object have its state. Raises BrokenCheckpoint where one does not take it."""
        for name, state in states.items():
            if name in self._tracked:
                _give(name, self._tracked[name], state)
            else:
                self._pending[name] = state


def _give(name: str, each: Any, state: Any) -> None:
    """Raises BrokenCheckpoint where `each` does not take its state."""
    try:
        each.load_state_dict(state)
    except UsageError:
        raise
    except Exception as error:  # whatever an object of the user's makes of it
        raise BrokenCheckpoint(
            f"{name}, which is a {type(each).__name__}, does not take its state in the "
            f"checkpoint ({type(error).__name__}: {error}). Track what was saved, or take another."
        ) from error


def _pickled(name: str, state: Any, odd: str) -> bytes:
    """A state as torch.save writes it, if it can be read without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    # At the save and not at the load, when the training would be lost.
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise CheckpointError(
            f"The state of {name} holds {odd}, and reading {', '.join(unsafe)} could run code, "
            "which a checkpoint never does. Let its state_dict() return tensors, numbers, text, "
            "and lists and maps of those."
        )
    return buffer.getvalue()


def _unpickled(path: Path, name: Any, sums: Mapping[str, str]) -> Any:
    """What file `name` of the checkpoint `path` holds, whose CRC-32 is in `sums` where known."""
    if not plain_name(name):
        raise BrokenCheckpoint(f"{path} names the file {name!r}, which is not one in its folder.")
    try:
        data = read_whole(path / name)
        if name in sums and crc_of(data) != sums[name]:
            raise BrokenCheckpoint(
                f"{path / name} is not what was written: its CRC-32 is not {sums[name]}. Take "
                "another checkpoint."
            )
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except BrokenCheckpoint:
        raise
    except Exception as error:  # whatever torch meets in a file that is not whole
        raise BrokenCheckpoint(f"{path / name} cannot be read: {error!r:.300}.") from error


# -- objects without a state_dict ------------------------------------------------------------


@dataclass(frozen=True)
class _StateAdapter:
    """Gives an object a `state_dict` and a `load_state_dict`."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def state_dict(self) -> Any:
        return self.get()

    def load_state_dict(self, state: Any) -> None:
        self.set(state)


def trackable(name: str, each: Any) -> Any:
    """`each` with `state_dict` and `load_state_dict`: as it is, or for it, where it is a generator
    (torch's, numpy's, random.Random), or a dict, list, deque or tensor, which is filled in place.

    Raises UsageError for anything else: a number, say, cannot be given its value back.
    """
    if all(callable(getattr(each, m, None)) for m in ("state_dict", "load_state_dict")):
        return each
    if isinstance(each, torch.Generator):
        return _StateAdapter(each.get_state, each.set_state)
    if isinstance(each, random.Random):
        # The state is (version, words, gauss), and JSON makes lists of tuples.
        return _StateAdapter(
            lambda: list(each.getstate()), lambda s: each.setstate((s[0], tuple(s[1]), s[2]))
        )
    if hasattr(each, "bit_generator"):  # numpy's, which may not be loaded
        bits = each.bit_generator
        return _StateAdapter(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(each, dict):
        return _StateAdapter(lambda: dict(each), partial(_refill, each, each.update))
    if isinstance(each, list | deque):
        return _StateAdapter(lambda: list(each), partial(_refill, each, each.extend))
    if isinstance(each, Tensor):
        return _StateAdapter(each.detach, each.detach().copy_)
    raise UsageError(
        f"engine.track({name}=...) takes an object with state_dict() and load_state_dict(), a "
        f"generator, a dict, a list or a tensor, not {type(each).__name__}, which nothing can be "
        f"given back to. Keep it in a dict: {name}s = {{...}}; engine.track({name}s={name}s)."
    )


def _refill(each: Any, fill: Callable[[Any], None], state: Any) -> None:
    each.clear()
    fill(state)
