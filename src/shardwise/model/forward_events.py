"""Records forwards in the timeline: those of models, and inside them those of repeated blocks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
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
            for name, module in self._noted(model):
                noted = _Noted(name)
                self._handles += [
                    attach(module.register_forward_pre_hook, noted.enter, prepend=True),
                    attach(module.register_forward_hook, noted.leave, always_call=True),
                ]

    def _noted(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if any(map(_is_compiled, model.modules())):
            return
        yield FORWARD, model
        for name, unit in find_units(model, self._patterns):
            yield f"{FORWARD} {name}", unit

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


class _Noted:
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
        began = self._open.pop() if self._open else None  # hooked on inside a forward
        if recording is not None and began is not None:
            note = TimelineEvent(Row.COMPUTE, self._name, began, time.monotonic_ns())
            recording.notes.append(note)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noted:
        return _Noted(self._name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
