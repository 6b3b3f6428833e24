"""Records forward passes of models, and of their repeated blocks, in the timeline."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.model.compilation import is_compiled_by_script
from shardwise.model.module_hooks import Hooked, attach
from shardwise.model.units import find_units
from shardwise.timeline import Row, recorder
from shardwise.timeline.recorder import TimelineEvent

FORWARD = "forward"


class ForwardEvents:
    """Hooks that record forward passes of `models` and their repeated blocks.

    `patterns` selects the blocks as in `find_units`. Compiled models are skipped.
    """

    def __init__(self, models: Sequence[nn.Module], patterns: Sequence[str] | None) -> None:
        self._models = models
        self._patterns = patterns
        self._handles: list[Hooked] = []
        # An engine may be dropped without close(), or fail in its constructor, but the models
        # remain.
        weakref.finalize(self, _remove, self._handles)
        # The recorder calls `attach` when a recording starts, and `detach` when it ends.
        recorder.watch(self)

    def attach(self) -> None:
        """Start recording forward passes."""
        self.detach()
        for model in self._models:
            # Hooks would break the graph of a compiled module.
            if any(map(is_compiled_by_script, model.modules())):
                continue
            units = find_units(model, self._patterns)
            named = [(FORWARD, model), *((f"{FORWARD} {name}", unit) for name, unit in units)]
            for name, module in named:
                hooks = _ForwardHooks(name)
                self._handles += [
                    attach(module.register_forward_pre_hook, hooks.enter, prepend=True),
                    attach(module.register_forward_hook, hooks.leave, always_call=True),
                ]

    def close(self) -> None:
        """Stop recording permanently."""
        recorder.unwatch(self)
        self.detach()

    def detach(self) -> None:
        """Stop recording forward passes."""
        _remove(self._handles)


def _remove(handles: list[Hooked]) -> None:
    while handles:
        handles.pop().remove()


class _ForwardHooks:
    """Hooks on a module. Copies of the module are recorded as well, until the recording ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[int] = []  # start times of the running forward passes

    def enter(self, module: nn.Module, args: Any) -> None:
        """Record the start time. Runs before a forward pass."""
        del module, args
        self._open.append(time.monotonic_ns())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the event. Runs after a forward pass, even if it failed."""
        del module, args, output
        recording = recorder.active
        # None if attached inside this forward pass
        began = self._open.pop() if self._open else None
        if recording is not None and began is not None:
            note = TimelineEvent(Row.COMPUTE, self._name, began, time.monotonic_ns())
            recording.notes.append(note)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardHooks:
        return _ForwardHooks(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}
