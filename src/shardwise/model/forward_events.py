"""Records forwards in the timeline: those of models, and inside them those of repeated blocks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.model.module_hooks import Hooked, attach
from shardwise.model.units import find_units
from shardwise.timeline import Row, recorder
from shardwise.timeline.recorder import TimelineEvent

FORWARD = "forward"


class ForwardEvents:
    """Hooks on `models` and their blocks (`patterns` as for `find_units`) while a timeline is
    recorded. What is compiled is left as it is."""

    def __init__(self, models: Sequence[nn.Module], patterns: Sequence[str] | None) -> None:
        self._models = models
        self._patterns = patterns
        self._handles: list[Hooked] = []
        # An engine may be dropped without close(), or fail while it is made; the models stay.
        weakref.finalize(self, _remove, self._handles)
        recorder.watch(self)

    def attach(self) -> None:
        """Record forwards from now on."""
        self.detach()
        for model in self._models:
            # Hooks would break the graph of a compiled module.
            if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules()):
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
        """Stop recording for good."""
        recorder.unwatch(self)
        self.detach()

    def detach(self) -> None:
        """Stop recording forwards."""
        _remove(self._handles)


def _remove(handles: list[Hooked]) -> None:
    while handles:
        handles.pop().remove()


class _ForwardHooks:
    """The hooks on one module. Those of a copy record as well, until recording ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[int] = []  # when those under way began

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        del module, args
        self._open.append(time.monotonic_ns())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward, also after one that failed."""
        del module, args, output
        recording = recorder.active
        began = self._open.pop() if self._open else None  # None: attached inside this forward
        if recording is not None and began is not None:
            note = TimelineEvent(Row.COMPUTE, self._name, began, time.monotonic_ns())
            recording.notes.append(note)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ForwardHooks:
        return _ForwardHooks(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}
