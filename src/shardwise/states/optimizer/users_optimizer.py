"""Updates with the user's optimizer itself, where each rank has everything whole.

A copy knows neither what an optimizer keeps in attributes, nor another one that it is a wrapper of,
nor state that belongs to no parameter. Where nothing is cut there is no need for one: the user's
optimizer steps over the user's own parameters, in which the engine has put the reduced gradients.
Its state stays with it, where its own methods and user code find it.

    parameter.data ◀─ master (if there is one)
    parameter.grad ◀─ reduced gradient        ─▶  optimizer.step()  ─▶  parameters as they were
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import optim

from shardwise.states.optimizer.inner_optimizer import InnerOptimizer
from shardwise.states.optimizer.offload_read_ahead import SpanInUse
from shardwise.states.optimizer.optimizer_lr_and_options import ParameterGroup
from shardwise.states.storage.storage import Storage


class UsersOptimizer(InnerOptimizer):
    """The user's optimizer over `intervals`, which are all that it trains."""

    def _made(self) -> optim.Optimizer:
        return self._groups[0].optimizer

    def _regroup(self) -> None:
        """The groups are the user's own."""

    def _follow(self) -> None:
        """There is no copy that could lag behind."""

    def options_of(self, group: ParameterGroup) -> dict[str, Any]:
        """The options of the user's own group."""
        return group.options

    def _set_divisor(self, factor: float) -> None:
        """The user's optimizer gets gradients that are divided already."""

    def _update(self, spans: Sequence[SpanInUse], used: Sequence[bool], factor: float) -> None:
        # The optimizer steps even if no parameter had a gradient, as it would in one process.
        with self._masters_shown():
            for span in spans:
                for segment in span.segments:
                    segment.tensor.grad = None  # the guard that stood there until now
                self._offer(span, used, factor)
            self._call()
        self._end(spans, changed=True)

    def step_often(self, evaluate: Callable[[], float], sums: Sequence[Storage]) -> None:
        """Make a step of an optimizer that calls `evaluate` as often as it wants."""
        spans = self._taken(0, sums)
        self._call(evaluate)
        self._end(spans, changed=True)

    def _call(self, *closure: Callable[[], float]) -> None:
        """The same with the user's optimizer, whose step may call its own public methods."""
        self.is_users_stepping = True
        try:
            super()._call(*closure)
        finally:
            self.is_users_stepping = False

    @contextmanager
    def _masters_shown(self) -> Iterator[None]:
        """Inside the block, parameters that have a master hold it."""
        segments = [s for i in self.intervals for s in i.segments if s.master is not None]
        before = [segment.tensor.data for segment in segments]
        for segment in segments:
            assert segment.master is not None
            segment.tensor.grad = None  # of another dtype, or on another device
            segment.tensor.data = segment.master
        try:
            yield
        finally:
            for segment, data in zip(segments, before, strict=True):
                segment.tensor.grad = None
                segment.tensor.data = data
