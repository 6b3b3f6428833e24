"""Restores attributes that a forward pass changed, so that it can be recomputed.

A forward pass may change attributes (a counter, a cache, a list) as well as buffers. A
recomputation must read the same values as the original forward pass, and must not make the changes
a second time. The changed attributes therefore have their previous values while the forward pass
runs again, and their current values afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ModelError

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks."""
_PLAIN = "torch.nn.modules."
"""Modules whose class is in this package do not change their attributes."""
_CONTAINERS = (list, dict, set, deque)
_LONG = 1000
"""Containers with at least this many entries are treated as data: only replacing them is
detected."""
_MISSING: Any = object()

Values = list[tuple[nn.Module, str, Any]]
"""Module, name and value of attributes. `_MISSING` if the attribute did not exist."""


@dataclass(frozen=True, eq=False)
class _Before:
    """A module's attributes before a forward pass.

    They include shallow copies of the module's containers, and the versions of its tensors.
    """

    module: nn.Module
    attributes: dict[str, Any]
    contents: list[tuple[str, Any, Any]]
    versions: list[tuple[str, Tensor, int]]


def look(unit: nn.Module) -> list[_Before]:
    """Return the current attributes of all modules in a unit."""
    return [
        _look_at(module)
        for module in unit.modules()
        if not type(module).__module__.startswith(_PLAIN)
    ]


def _look_at(module: nn.Module) -> _Before:
    attributes = dict(vars(module))
    contents, versions = [], []
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            if not value.is_inference():  # torch does not count writes to those
                versions.append((name, value, value._version))
        # Use a shallow copy. It misses changes inside an element, but a deep copy would cost too
        # much.
        elif type(value) in _CONTAINERS and name not in _OWN and len(value) < _LONG:
            contents.append((name, value, value.copy()))
    return _Before(module, attributes, contents, versions)


def changed(before: list[_Before]) -> Values:
    """Return the previous values of the attributes that have changed since `before`.

    Raises ModelError if a tensor was changed in place.
    """
    return [value for module_before in before for value in _changes(module_before)]


def _changes(before: _Before) -> Iterator[tuple[nn.Module, str, Any]]:
    module, then, now = before.module, before.attributes, vars(before.module)
    for name, tensor, version in before.versions:
        if tensor._version != version:
            raise _in_place_error(module, name)
    copies = {name: copy for name, _, copy in before.contents}
    # Do the cheap check first, because most forward passes change no attribute.
    if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
        for name in (then.keys() | now.keys()) - _OWN:
            if then.get(name, _MISSING) is not now.get(name, _MISSING):
                yield module, name, copies.pop(name, then.get(name, _MISSING))
    for name, value, copy in before.contents:
        if name not in copies:
            continue
        # Compare by identity: comparing tensors in a container by value would compute or raise.
        is_dict = isinstance(value, dict)
        pairs = (value.values(), copy.values()) if is_dict else (value, copy)
        keys_are_same = not is_dict or value.keys() == copy.keys()
        if len(value) != len(copy) or not keys_are_same or not all(map(is_, *pairs)):
            yield module, name, copy


@contextmanager
def stand_ins(values: Values) -> Iterator[None]:
    """Context manager that sets attributes to `values`, and restores them on exit."""
    held = [(module, name, vars(module).get(name, _MISSING)) for module, name, _ in values]
    try:
        for module, name, value in values:
            _set(module, name, value.copy() if type(value) in _CONTAINERS else value)
        yield
    finally:
        for module, name, value in held:
            _set(module, name, value)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _in_place_error(module: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"The forward of {type(module).__name__} changes its tensor attribute {name} in place. "
        "With --activations recomputed, forward runs again in backward, and would read the changed "
        f"tensor and change it again. Make it a buffer, register_buffer({name!r}, ...), which is "
        "handled, or use --activations kept."
    )
