"""Updates states span by span if they are on a disk (NVMe), on the host or in 8 bits.

While one span is updated, the next one is read and the previous one is written:

    read_ahead   [ 0 ][ 1 ][ 2 ][ 3 ]
    SpanInUse         [ 0 ][ 1 ][ 2 ][ 3 ]      bound to segments and their state, then updated
    written                [ 0 ][ 1 ][ 2 ][ 3 ]

Segments and state on a disk are tensors with a shape but no storage. While their span is updated,
they are views of the span's memory. Quantised state is treated in the same way: its span occupies
memory in full precision only during the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, optim

from shardwise.errors import TierError
from shardwise.layout.bucket_layout import Span
from shardwise.states.optimizer.inner_optimizer import InnerOptimizer, UpdatePart
from shardwise.states.optimizer.update_interval import (
    BucketUpdate,
    UpdatedTensor,
    has_no_memory,
    without_memory,
)
from shardwise.states.storage.host_storage import HostCopy
from shardwise.states.storage.storage import MemoryStorage, Storage, in_spans


def by_spans(inner: InnerOptimizer) -> Iterator[list[UpdatePart]]:
    """Yield the intervals span by span. If there are several, each must have a single span."""
    count = max(len(interval.spans) for interval in inner.intervals)
    for index in range(count):
        spans = [
            SpanInUse(inner.inner, interval, index, _gradient_of(interval))
            for interval in inner.intervals
        ]
        # Read ahead only after the line above, so that the threads first read the current span.
        if index + 1 < count:
            _read_ahead(inner, index + 1)
        elif inner.following is not None:
            _read_ahead(inner.following, 0)
        yield [*spans]
        for span in spans:
            span.end(changed=span.changed)


def store_state(inner: InnerOptimizer, interval: BucketUpdate) -> None:
    """Write the state of all segments to its separate storage, if it has one."""
    for index in range(len(interval.spans) if interval.moments else 0):
        SpanInUse(inner.inner, interval, index, None).end(changed=True)


def _gradient_of(interval: BucketUpdate) -> Storage:
    """Return the reduced gradient on the master's device, split into the interval's spans."""
    total, copy_stream = interval.gradient.reduced, interval.master.copy_stream
    if copy_stream is None or total.copy_stream is not None:
        return in_spans(total, interval.spans)
    assert isinstance(total, MemoryStorage)
    if interval.host_copy is None or interval.host_copy.source is not total.tensor:
        # The sums are in a new tensor after they were widened. Replace the copy of the old tensor,
        # which it would keep alive.
        interval.host_copy = HostCopy(total.tensor, copy_stream, interval.spans)
    return interval.host_copy


def _read_ahead(inner: InnerOptimizer, index: int) -> None:
    """Start reading span `index` of each interval that has such a span, and of its gradient."""
    for interval in inner.intervals:
        if index < len(interval.spans):
            for storage in {interval.target, interval.master, _gradient_of(interval)}:
                storage.read_ahead(index)
            for key, storage in interval.moments.items():
                states = (
                    inner.inner.state.get(segment.tensor, {})
                    for segment in interval.within(interval.spans[index])
                )
                # Before the first update there is nothing to read on the disk.
                if any(key in state and has_no_memory(state[key]) for state in states):
                    storage.read_ahead(index)


class SpanInUse(UpdatePart):
    """A span of an interval, loaded into memory.

    The span's segments and their state are views of this memory until `end` is called.
    """

    def __init__(
        self, inner: optim.Optimizer, interval: BucketUpdate, index: int, total: Storage | None
    ) -> None:
        self._inner = inner
        self._interval = interval
        self._index = index
        segments = interval.within(interval.spans[index])
        self._master = interval.master.take(index)
        self._target = interval.target.take(index) if interval.has_master else self._master
        self._total = total
        gradient = self._master
        if total is not None:
            gradient = total.take_on(index, interval.master.device)
        super().__init__(interval.own[0] + interval.spans[index][0], segments, gradient)
        self._moments = {
            # `fresh` before the first update, when no segment has this state on the disk yet.
            key: storage.take(
                index, fresh=not any(has_no_memory(state[key]) for _, state in self._states(key))
            )
            for key, storage in interval.moments.items()
        }
        if interval.master.memory is None:
            for segment in self.segments:
                a, b = self._place(segment)
                segment.tensor.data = self._master[a:b]
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                if has_no_memory(state[key]):
                    a, b = self._place(segment)
                    state[key] = moment[a:b]

    def _place(self, segment: UpdatedTensor) -> Span:
        return segment.first - self.start, segment.end - self.start

    def _states(self, key: str) -> list[tuple[UpdatedTensor, dict[str, Any]]]:
        states = [
            (s, self._inner.state[s.tensor]) for s in self.segments if s.tensor in self._inner.state
        ]
        return [(segment, state) for segment, state in states if key in state]

    def end(self, *, changed: bool) -> None:
        """Release the span. If it changed, write it back asynchronously."""
        interval, index = self._interval, self._index
        for key, moment in self._moments.items():
            for segment, state in self._states(key):
                self._store_state(segment, state, key, moment)
            interval.moments[key].put(index, changed=changed)
        if interval.master.memory is None:
            # The next span reuses the buffer, so nothing may refer to it any more.
            for segment in self.segments:
                numel = segment.end - segment.first
                segment.tensor.data = without_memory(numel, interval.master.dtype)
        # Send the parameter before `put`: the copy reads the master's buffer, which `put` returns.
        if interval.has_master:
            interval.master.send(index, self._master, self._target)
            interval.target.put(index, changed=changed)
        interval.master.put(index, changed=changed)
        if self._total is not None:
            self._total.put(index, changed=False)

    def _store_state(
        self, segment: UpdatedTensor, state: dict[str, Any], key: str, moment: Tensor
    ) -> None:
        """Move a segment's state to `moment`, the span's memory, if it is not there yet."""
        a, b = self._place(segment)
        if state[key].dtype != moment.dtype:
            raise TierError(
                f"{type(self._inner).__name__} keeps {key} as {state[key].dtype}, but the space on "
                f"the disk is for {moment.dtype}. Write --offload-optimizer cpu."
            )
        if state[key].data_ptr() != moment[a:b].data_ptr():
            moment[a:b] = state[key]
        state[key] = without_memory(b - a, moment.dtype)
