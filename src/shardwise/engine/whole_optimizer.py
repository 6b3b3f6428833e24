"""Gives a user's optimizer its full state while one of its methods runs.

Methods such as `eval()` of a schedule-free optimizer read state and write parameters. If the engine
shards state or has fp32 masters, it moves everything back into the user's objects for such a
method, as `close` does. Afterwards, it builds its states again:

    optimizer.eval()  ─▶  the method uses group["params"] or self.state
                      ─▶  parameters hold their masters, and the optimizer has its full state
                      ─▶  the method continues as in a single process
                      ─▶  the engine lays out its states from the new values

A method that uses neither costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.model.optimizer_access import StateOfEngine, WatchedGroup
from shardwise.states.step_hooks import Kept

TakenApart = tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]


@dataclass(frozen=True)
class Rebuilding:
    """An engine's methods that move its states to the user's objects and back. All are collective.

    `check` takes the name of the optimizer's method, and raises UsageError if the states cannot be
    moved now.
    """

    check: Callable[[str], None]
    take_apart: Callable[[], TakenApart]
    rebuild: Callable[[Mapping[nn.Parameter, Tensor], Any, Any], None]


@contextmanager
def whole(
    optimizer: optim.Optimizer, method: str, engine: Rebuilding, reach: Callable[[], None]
) -> Iterator[None]:
    """Context manager that gives `optimizer` full parameters and state once its `method` uses them.

    After the block, any use of the optimizer's state calls `reach`.
    """
    state: Any = optimizer.state
    kept: list[tuple[TakenApart, dict[nn.Parameter, torch.dtype]]] = []
    is_open = False

    def open_() -> None:
        nonlocal is_open
        if is_open:
            return  # already gathered; the engine's own reads arrive here too
        is_open = True
        engine.check(f"{type(optimizer).__name__}.{method}()")
        apart = engine.take_apart()
        masters = apart[0]
        # Let 16-bit parameters hold their fp32 masters while the method runs.
        narrow = {p: p.dtype for p, master in masters.items() if p.dtype != master.dtype}
        for parameter in narrow:
            parameter.data = masters[parameter].to(parameter.device)
        kept.append((apart, narrow))
        if isinstance(state, StateOfEngine):
            state.show(state.resting)

    # Change the list in place, because schedulers hold the same list.
    optimizer.param_groups[:] = [WatchedGroup(group, open_) for group in optimizer.param_groups]
    if isinstance(state, StateOfEngine):
        state.reach = open_
    try:
        yield
    finally:
        is_open = True
        optimizer.param_groups[:] = [
            # The method may have added or replaced groups, so restore only the wrapped ones.
            g.restore_group() if isinstance(g, WatchedGroup) else g
            for g in optimizer.param_groups
        ]
        if kept and isinstance(state, StateOfEngine):
            left = dict(optimizer.state)  # the method may have assigned a new mapping
            state.resting.clear()
            state.resting.update(left)
        if isinstance(state, StateOfEngine):
            optimizer.state = state
            state.hide(reach)
        for (masters, averages, anchor), dtypes in kept:
            engine.rebuild(_take_masters(masters, dtypes), averages, anchor)


def _take_masters(
    masters: Mapping[nn.Parameter, Tensor], dtypes: Mapping[nn.Parameter, torch.dtype]
) -> dict[nn.Parameter, Tensor]:
    """Return the parameters' values as new masters, and cast the parameters back to `dtypes`."""
    # Read the values before the cast, while the parameters still hold fp32 values.
    left = {parameter: parameter.detach() for parameter in masters}
    for parameter, dtype in dtypes.items():
        parameter.data = parameter.detach().to(dtype)
    return left


Marks = list[tuple[Any, Any, Any, int]]


def marks(state: Mapping[Any, Any]) -> Marks:
    """Return the entries in `state` with their tensor versions, to detect changes by user code."""
    return [
        (key, name, value, value._version if isinstance(value, Tensor) else 0)
        for key, entries in state.items()
        for name, value in (entries.items() if isinstance(entries, Mapping) else [(None, entries)])
    ]


def are_equal(before: Marks, now: Marks) -> bool:
    """Return whether two results of `marks` show no change."""
    return len(before) == len(now) and all(
        a[0] is b[0] and a[1] == b[1] and a[2] is b[2] and a[3] == b[3]
        for a, b in zip(before, now, strict=True)
    )
