"""Runs the update with the user's optimizer itself, if each rank has the full state.

A copy of an optimizer does not share its attributes, any optimizer that it wraps, or state that
belongs to no parameter. If nothing is sharded, no copy is needed. The engine then assigns the
reduced gradients to the parameters' `grad`, and the user's optimizer updates the parameters. Its
state stays in the optimizer itself, for its own methods and for user code.

    parameter.data ◀─ master (if there is one)
    parameter.grad ◀─ reduced gradient        ─▶  optimizer.step()  ─▶  parameter.data restored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import optim

from shardwise.states.optimizer.inner_optimizer import DeviceFactor, InnerOptimizer, UpdatePart
from shardwise.states.optimizer.optimizer_options import ParameterGroup


class UsersOptimizer(InnerOptimizer):
    """The user's own optimizer. `intervals` covers every parameter that the optimizer trains."""

    def _make_optimizer(self) -> optim.Optimizer:
        return self._groups[0].optimizer

    def _regroup(self) -> None:
        """No-op: the groups are the user's own."""

    def _follow(self) -> None:
        """No-op: there is no copy to keep up to date."""

    def options_of(self, group: ParameterGroup) -> dict[str, Any]:
        """Return the options of the user's own group."""
        return group.options

    def _set_divisor(self, factor: float | DeviceFactor) -> None:
        """No-op: the user's optimizer receives gradients that are already divided."""

    def _update(
        self, parts: Sequence[UpdatePart], used: Sequence[bool], factor: float | DeviceFactor
    ) -> None:
        # Step even if no parameter had a gradient, as a single process would.
        with self._masters_shown():
            self._clear(parts)  # `param.grad` still has the guards
            for part in parts:
                self._offer(part, used, factor)
            self._call()
        self._clear(parts)

    def step_often(self, evaluate: Callable[[], float]) -> None:
        for parts in self._parts(self):
            self._call(evaluate)
            self._clear(parts)

    def _call(self, *closure: Callable[[], float]) -> None:
        """Call `step`, and allow the user's optimizer to call its own public methods meanwhile."""
        self.is_users_stepping = True
        try:
            super()._call(*closure)
        finally:
            self.is_users_stepping = False

    @contextmanager
    def _masters_shown(self) -> Iterator[None]:
        """Context manager inside which parameters that have a master hold the master's values."""
        segments = [s for i in self.intervals for s in i.segments if s.master is not None]
        # Save the tensors themselves, not copies: the update writes to masters, which are later
        # rounded into these tensors.
        before = [segment.tensor.data for segment in segments]
        for segment in segments:
            assert segment.master is not None
            segment.tensor.grad = None  # its dtype or device differs from the master's
            segment.tensor.data = segment.master
        try:
            yield
        finally:
            for segment, data in zip(segments, before, strict=True):
                segment.tensor.grad = None
                segment.tensor.data = data
