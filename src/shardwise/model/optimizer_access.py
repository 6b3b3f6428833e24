"""Shows user code and an optimizer's own methods the whole state of an engine's optimizer.

While the engine has the state, `optimizer.state` is a StateOfEngine. Any use of it, and any use of
`group["params"]` in a method of the optimizer, first calls `reach`, which makes the state whole or
refuses:

    optimizer.eval() uses group["params"] or self.state  ─▶  reach()  ─▶  all is whole  ─▶  go on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import optim

Reach = Callable[[], None]


def held(optimizer: optim.Optimizer) -> MutableMapping[Any, Any]:
    """The state that is with `optimizer` itself, such as that of frozen parameters."""
    state: Any = optimizer.state
    return state.resting if isinstance(state, StateOfEngine) else state


class StateOfEngine(defaultdict[Any, Any]):
    """Stands for the state of an optimizer while the engine has it; `resting` is what it left.

    Each use calls `reach`, if there is one. Without, it is a plain mapping.
    """

    def __init__(self, resting: MutableMapping[Any, Any]) -> None:
        super().__init__(dict)
        self.resting = resting
        self.reach: Reach | None = None

    def show(self, content: MutableMapping[Any, Any]) -> None:
        """Be `content` from now on."""
        self.reach = None
        super().clear()
        super().update(content)

    def hide(self, reach: Reach) -> None:
        """Be empty, and call `reach` at the next use."""
        super().clear()
        self.reach = reach

    def _use(self) -> None:
        if self.reach is not None:
            self.reach()

    def __reduce__(self) -> Any:
        """A copy is a plain mapping."""
        self._use()
        return defaultdict, (dict, dict(self.items()))


def _watched(base: type[Any], name: str, use: Callable[[Any, Any], None]) -> Callable[..., Any]:
    plain = getattr(base, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        use(self, args)
        return plain(self, *args, **kwargs)

    return method


_READS = ("__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__")
_VIEWS = ("get", "keys", "values", "items", "copy", "__copy__", "__or__", "__ror__", "__reversed__")
_WRITES = ("__setitem__", "__delitem__", "setdefault", "pop", "popitem", "clear", "update")

for _name in (*_READS, *_VIEWS, *_WRITES, "__ior__"):
    setattr(StateOfEngine, _name, _watched(defaultdict, _name, lambda self, _: self._use()))


class WatchedGroup(dict[str, Any]):
    """A parameter group for the time of a method: its use of "params" calls `reach`."""

    def __init__(self, group: dict[str, Any], reach: Reach) -> None:
        super().__init__(group)
        self.group = group
        self.reach = reach

    def taken_back(self) -> dict[str, Any]:
        """The group itself, with what was changed meanwhile."""
        self.group.clear()
        self.group.update(dict.items(self))
        return self.group


def _use_of_group(group: WatchedGroup, args: tuple[Any, ...]) -> None:
    if not args or args[0] == "params":
        group.reach()


for _name in ("__getitem__", "get", "values", "items", "pop"):
    setattr(WatchedGroup, _name, _watched(dict, _name, _use_of_group))


def own_methods(optimizer: optim.Optimizer) -> Iterator[str]:
    """The names of the public methods that the class of `optimizer` has beside those of torch's
    Optimizer."""
    for name in dir(type(optimizer)):
        is_own = not name.startswith("_") and not hasattr(optim.Optimizer, name)
        if is_own and callable(getattr(type(optimizer), name)):
            yield name
