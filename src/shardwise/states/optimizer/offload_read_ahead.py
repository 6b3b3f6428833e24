"""Reads the spans of an update ahead, from NVMe or the host, and writes them behind.

While one span is updated, the next one is read and the one before is written:

    read_ahead   [ 0 ][ 1 ][ 2 ][ 3 ]
    SpanInUse         [ 0 ][ 1 ][ 2 ][ 3 ]      bound to segments and their state, then updated
    written                [ 0 ][ 1 ][ 2 ][ 3 ]

Segments and state that rest on a disk are bound to a span's memory for the time of its update, and
keep their shapes, without memory, for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim

from shardwise.errors import TierError
from shardwise.states.parameters.update_intervals import (
    UpdateInterval,
    UpdateSegment,
    has_no_memory,
    without_memory,
)
from shardwise.states.storage.storage import Span, Storage


def read_ahead(
    inner: optim.Optimizer,
    index: int,
    intervals: Sequence[UpdateInterval],
    sums: Sequence[Storage],
) -> None:
    """Start to read span `index` of each interval and of its reduced gradient, where there is one;
    what is in memory is there already."""
    for interval, total in zip(intervals, sums, strict=True):
        if index < len(interval.spans):
            for storage in {interval.target, interval.master, total}:
                storage.read_ahead(index)
            for key, storage in interval.moments.items():
                # Before the first update there is nothing on the disk to be read.
                if _is_stowed(inner, interval, interval.spans[index], key):
                    storage.read_ahead(index)


def _is_stowed(inner: optim.Optimizer, interval: UpdateInterval, span: Span, key: str) -> bool:
    """Whether any segment of a span has state on the disk."""
    states = (inner.state.get(segment.tensor, {}) for segment in interval.within(span))
    return any(key in state and has_no_memory(state[key]) for state in states)


def stow(inner: optim.Optimizer, interval: UpdateInterval) -> None:
    """Put the state of all segments where it rests."""
    for index in range(len(interval.spans) if interval.moments else 0):
        SpanInUse(inner, interval, index, None).end(changed=True)


class SpanInUse:
    """One span of an interval in memory, its segments and state bound to it until `end`."""

    def __init__(
        self, inner: optim.Optimizer, interval: UpdateInterval, index: int, total: Storage | None
    ) -> None:
        self._inner = inner
        self._interval = interval
        self._index = index
        self._start = interval.own[0] + interval.spans[index][0]
        self.segments = interval.within(interval.spans[index])
        self.master = interval.master.take(index)
        self.target = interval.target.take(index) if interval.has_master else self.master
        device = interval.master.device
        self.total = self.master if total is None else total.take_on(index, device)
        self._total = total
        self._moments = {
            key: storage.take(index, fresh=not self._has_stowed(key))
            for key, storage in interval.moments.items()
        }
        self._bind()

    def place(self, segment: UpdateSegment) -> Span:
        """Where a segment lies in the span."""
        return segment.first - self._start, segment.end - self._start

    def _states(self, key: str) -> list[tuple[UpdateSegment, dict[str, Any]]]:
        found = [
            (s, self._inner.state[s.tensor]) for s in self.segments if s.tensor in self._inner.state
        ]
        return [(segment, state) for segment, state in found if key in state]

    def _has_stowed(self, key: str) -> bool:
        return any(has_no_memory(state[key]) for _, state in self._states(key))

    def _bind(self) -> None:
        if self._interval.master.memory is None:
            for segment in self.segments:
                a, b = self.place(segment)
                segment.tensor.data = self.master[a:b]
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                if has_no_memory(state[key]):
                    a, b = self.place(segment)
                    state[key] = moment[a:b]

    def end(self, *, changed: bool) -> None:
        """Let everything rest again; what was `changed` is written behind."""
        interval, index = self._interval, self._index
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                self._stow(segment, state, key, moment)
            interval.moments[key].put(index, changed=changed)
        if interval.master.memory is None:
            # The span's buffer is another span's next: nothing may point into it any more.
            for segment in self.segments:
                numel = segment.end - segment.first
                segment.tensor.data = without_memory(numel, interval.master.dtype)
        if interval.has_master:
            interval.master.send(index, self.master, self.target)
            interval.target.put(index, changed=changed)
        interval.master.put(index, changed=changed)
        if self._total is not None:
            self._total.put(index, changed=False)

    def _stow(
        self, segment: UpdateSegment, state: dict[str, Any], key: str, moment: Tensor
    ) -> None:
        """Leave one segment's state in its span's memory; the first time it comes from outside."""
        a, b = self.place(segment)
        if state[key].dtype != moment.dtype:
            raise TierError(
                f"{type(self._inner).__name__} keeps {key} as {state[key].dtype}, where a disk has "
                f"room for {moment.dtype}. Write --offload-optimizer cpu."
            )
        if state[key].data_ptr() != moment[a:b].data_ptr():
            moment[a:b] = state[key]
        state[key] = without_memory(b - a, moment.dtype)
