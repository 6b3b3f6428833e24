"""Gives user code and the optimizer's own methods access to the full optimizer state.

While the engine owns the state, `optimizer.state` is a StateOfEngine. Any use of it, and any use of
`group["params"]` in a method of the optimizer, first calls `reach`, which gathers the full state or
raises an error:

    optimizer.eval() uses group["params"] or self.state  ─▶  reach()  ─▶  full state
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import optim

Reach = Callable[[], None]


def held(optimizer: optim.Optimizer) -> MutableMapping[Any, Any]:
    """Return the state that `optimizer` itself holds, such as that of frozen parameters."""
    state: Any = optimizer.state
    return state.resting if isinstance(state, StateOfEngine) else state


class StateOfEngine(defaultdict[Any, Any]):
    """Stands in for an optimizer's `state` while the engine owns that state.

    If `reach` is set, it is called before every access. Otherwise this behaves like a plain
    mapping. `resting` holds any entries that the engine does not own.
    """

    def __init__(self, resting: MutableMapping[Any, Any]) -> None:
        super().__init__(dict)
        self.resting = resting
        self.reach: Reach | None = None

    def show(self, content: MutableMapping[Any, Any]) -> None:
        """Replace the entries with those of `content`, and stop calling `reach`."""
        self.reach = None
        super().clear()
        super().update(content)

    def hide(self, reach: Reach) -> None:
        """Drop all entries, and call `reach` before each access from now on."""
        super().clear()
        self.reach = reach

    def _use(self) -> None:
        if self.reach is not None:
            self.reach()

    def __reduce__(self) -> Any:
        """Pickle and copy this object as a plain mapping."""
        self._use()
        return defaultdict, (dict, dict(self.items()))


def _watch(base: type[Any], name: str, use: Callable[[Any, Any], None]) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        use(self, args)
        return plain(self, *args, **kwargs)

    return method


_READS = ("__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__")
_VIEWS = ("get", "keys", "values", "items", "copy", "__copy__", "__or__", "__ror__", "__reversed__")
_WRITES = ("__setitem__", "__delitem__", "setdefault", "pop", "popitem", "clear", "update")

# Set on the class, because Python does not look up special methods on instances.
for _name in (*_READS, *_VIEWS, *_WRITES, "__ior__"):
    setattr(StateOfEngine, _name, _watch(defaultdict, _name, lambda self, _: self._use()))


class WatchedGroup(dict[str, Any]):
    """Stands in for a parameter group during a method call. Using its "params" calls `reach`."""

    def __init__(self, group: dict[str, Any], reach: Reach) -> None:
        super().__init__(group)
        self.group = group
        self.reach = reach

    def restore_group(self) -> dict[str, Any]:
        """Return the original group, with the method's changes applied."""
        self.group.clear()
        self.group.update(dict.items(self))
        return self.group


def _reach_params(group: WatchedGroup, args: tuple[Any, ...]) -> None:
    # `values` and `items` have no arguments, and include "params".
    if not args or args[0] == "params":
        group.reach()


for _name in ("__getitem__", "get", "values", "items", "pop"):
    setattr(WatchedGroup, _name, _watch(dict, _name, _reach_params))


def own_methods(optimizer: optim.Optimizer) -> Iterator[str]:
    """Yield the public methods that the class of `optimizer` adds to torch's Optimizer."""
    for name in dir(type(optimizer)):
        is_own = not name.startswith("_") and not hasattr(optim.Optimizer, name)
        if is_own and callable(getattr(type(optimizer), name)):
            yield name
