"""Gives a user's optimizer its whole state back for the time of one of its methods.

Methods such as `eval()` of a schedule-free optimizer read state and write parameters. An engine
that shards state, or keeps masters, takes its states apart for such a method, as it does at its
end, and lays them out again after it:

    optimizer.eval()  ─▶  group["params"] or self.state is used
                      ─▶  parameters hold their masters, state is whole and with the optimizer
                      ─▶  the method goes on as in one process
                      ─▶  the states are laid out from what it has left

A method that uses neither costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.islands.anchor import Kept
from shardwise.model.optimizer_access import StateOfEngine, WatchedGroup

TakenApart = tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]


@dataclass(frozen=True)
class Rebuilding:
    """How an engine gives its states back, and takes them again: collective calls.

    `check` raises UsageError with the name of the method that is called where neither can be.
    """

    check: Callable[[str], None]
    take_apart: Callable[[], TakenApart]
    rebuild: Callable[[Mapping[nn.Parameter, Tensor], Any, Any], None]


@contextmanager
def whole(
    optimizer: optim.Optimizer, method: str, engine: Rebuilding, reach: Callable[[], None]
) -> Iterator[None]:
    """Inside the block, parameters and state of `optimizer` are whole once they are used, for its
    `method`. After it, a use of its state calls `reach` again."""
    state: Any = optimizer.state
    kept: list[tuple[TakenApart, dict[nn.Parameter, torch.dtype]]] = []
    is_open = False

    def open_() -> None:
        nonlocal is_open
        if is_open:
            return  # by now the engine itself, or the method, may read all
        is_open = True
        engine.check(f"{type(optimizer).__name__}.{method}()")
        apart = engine.take_apart()
        kept.append((apart, _show_masters(apart[0])))
        if isinstance(state, StateOfEngine):
            state.show(state.resting)

    optimizer.param_groups[:] = [WatchedGroup(group, open_) for group in optimizer.param_groups]
    if isinstance(state, StateOfEngine):
        state.reach = open_
    try:
        yield
    finally:
        is_open = True
        optimizer.param_groups[:] = [
            g.taken_back() if isinstance(g, WatchedGroup) else g for g in optimizer.param_groups
        ]
        if kept and isinstance(state, StateOfEngine):
            left = dict(optimizer.state)  # the method may have assigned another mapping
            state.resting.clear()
            state.resting.update(left)
        if isinstance(state, StateOfEngine):
            optimizer.state = state
            state.hide(reach)
        for (masters, averages, anchor), dtypes in kept:
            engine.rebuild(_taken_masters(masters, dtypes), averages, anchor)


def _show_masters(masters: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, torch.dtype]:
    """Let parameters of 16 bits hold their masters; returns the dtypes that they had."""
    narrow = {p: p.dtype for p, master in masters.items() if p.dtype != master.dtype}
    for parameter in narrow:
        parameter.data = masters[parameter].to(parameter.device)
    return narrow


def _taken_masters(
    masters: Mapping[nn.Parameter, Tensor], dtypes: Mapping[nn.Parameter, torch.dtype]
) -> dict[nn.Parameter, Tensor]:
    """The values that the method has left, when parameters have their own `dtypes` again."""
    left = {parameter: parameter.detach() for parameter in masters}
    for parameter, dtype in dtypes.items():
        parameter.data = parameter.detach().to(dtype)
    return left


Marks = list[tuple[Any, Any, Any, int]]


def marks(state: Mapping[Any, Any]) -> Marks:
    """What tells whether user code has changed `state`: its entries, with the versions of
    tensors."""
    return [
        (key, name, value, value._version if isinstance(value, Tensor) else 0)
        for key, entries in state.items()
        for name, value in (entries.items() if isinstance(entries, Mapping) else [(None, entries)])
    ]


def are_equal(before: Marks, now: Marks) -> bool:
    """Whether nothing was changed between two `marks`."""
    return len(before) == len(now) and all(
        a[0] is b[0] and a[1] == b[1] and a[2] is b[2] and a[3] == b[3]
        for a, b in zip(before, now, strict=True)
    )
