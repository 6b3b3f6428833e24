"""Hides our hooks and replaced `forward` methods on a user's modules from copies and pickles.

Copies and pickles of a module are plain and contain none of our objects, so a file written by
torch.save loads without Shardwise. The one exception is precision: deepcopy keeps its hooks, so
that a copy in this process computes in the same precision.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class _PlainState:
    """The `__getstate__` of a module with our hooks or attributes. pickle and deepcopy call it.

    Attributes:
        hooks: Ids of our hooks.
        ours: Maps each attribute that we have set to our value and a list, which holds the previous
            value, if any.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.hooks: set[int] = set()
        self.kept: set[int] = set()
        """Ids of the hooks that deepcopy keeps."""
        self._copies = False
        self.ours: dict[str, tuple[Any, list[Any]]] = {}

    def __call__(self) -> Any:
        state = type(self._module).__getstate__(self._module)  # type: ignore[no-untyped-call]
        return self._plain(state) if isinstance(state, dict) else state

    def _plain(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden_hooks = self.hooks - self.kept if self._copies else self.hooks
        plain = dict(state)
        for name, value in state.items():
            if isinstance(value, dict) and name.endswith(_HOOK_DICTS):
                plain[name] = type(value)(
                    (k, hook) for k, hook in value.items() if k not in hidden_hooks
                )
        # Remove this object, too: a file written by torch.save must load without Shardwise.
        if isinstance(plain.get(_NAME), _PlainState):
            del plain[_NAME]
            plain.pop(_DEEPCOPY, None)
        for name, (value, before) in self.ours.items():
            if plain.get(name) is value:
                del plain[name]
                plain.update(zip([name] * len(before), before, strict=True))
        return plain

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy of the module that has the `kept` hooks."""
        self._copies = True
        try:
            # Do what copy.deepcopy does by default. Calling copy.deepcopy would recurse into this
            # method.
            reduced: Any = self._module.__reduce_ex__(4)
        finally:
            self._copies = False
        return copy._reconstruct(self._module, memo, *reduced)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        # Reached only for a class that copies its own `__dict__`. Any method that every object has
        # will do.
        return getattr, (self._module, "__dir__")


_NAME = "__getstate__"
_DEEPCOPY = "__deepcopy__"
_HOOK_DICTS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class Hooked:
    """Handle of one of our hooks on a module."""

    def __init__(self, module: nn.Module, handle: RemovableHandle, *, kept: bool) -> None:
        self._module = module
        self._handle = handle
        state = _state_of(module)
        state.hooks.add(handle.id)
        # Skip a class that defines __deepcopy__ itself.
        if kept and not hasattr(type(module), _DEEPCOPY):
            state.kept.add(handle.id)
            vars(module)[_DEEPCOPY] = state.deepcopy

    def remove(self) -> None:
        self._handle.remove()
        state = _state_of(self._module)
        state.hooks.discard(self._handle.id)
        state.kept.discard(self._handle.id)
        _tidy(self._module, state)


def attach(
    register: Callable[..., RemovableHandle],
    hook: Callable[..., Any],
    *,
    kept: bool = False,
    **how: Any,
) -> Hooked:
    """Register one of our hooks on a module.

    Args:
        register: A bound method of the module, such as `module.register_forward_hook`.
        hook: The hook.
        kept: Whether deepcopies of the module keep the hook.
        how: Additional arguments for `register`.
    """
    module: nn.Module = register.__self__  # type: ignore[attr-defined]
    return Hooked(module, register(hook, **how), kept=kept)


def replace(module: nn.Module, name: str, value: Any) -> None:
    """Set attribute `name` of `module` to `value`. `give_back` restores the previous value."""
    before = [vars(module)[name]] if name in vars(module) else []
    setattr(module, name, value)
    _state_of(module).ours[name] = (value, before)


class ReplacedForward:
    """Base class of objects that replace `unit.forward`. The unit's hooks run outside them.

    Copies and pickles of the unit have their original `forward`.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._before: Callable[..., Any] | None = vars(unit).get("forward")
        self.plain: Callable[..., Any] = unit.forward
        # Libraries inspect the signature of `forward` to decide which arguments to pass.
        functools.update_wrapper(self, self.plain)  # type: ignore[arg-type]
        replace(unit, "forward", self)

    def undo(self) -> None:
        give_back(self.unit, "forward", self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Needed only if a user's wrapper refers to this object. Return the copied unit's bound
        # method: at lookup time, the copy has no other `forward` yet.
        if self._before is None:
            return getattr, (self.unit, "forward")
        return getattr, (SimpleNamespace(forward=self._before), "forward")


def give_back(module: nn.Module, name: str, value: Any) -> None:
    """Undo `replace`, given the same arguments. A value that the user has set since then stays."""
    state = _state_of(module)
    replacement = state.ours.get(name, (None, []))
    if replacement[0] is value:
        del state.ours[name]
        # If the user has replaced our value since, keep the user's.
        if vars(module).get(name) is value:
            delattr(module, name)
            for previous in replacement[1]:
                setattr(module, name, previous)
    _tidy(module, state)


def _state_of(module: nn.Module) -> _PlainState:
    found = vars(module).get(_NAME)
    if not isinstance(found, _PlainState):
        # Set it on the instance, where copy and pickle find it before the class's method.
        found = vars(module)[_NAME] = _PlainState(module)
    return found


def _tidy(module: nn.Module, state: _PlainState) -> None:
    if not state.kept:
        vars(module).pop(_DEEPCOPY, None)
    if not (state.hooks or state.ours):
        vars(module).pop(_NAME, None)
