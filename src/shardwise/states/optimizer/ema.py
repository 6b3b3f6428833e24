"""Computes the exponential moving average (EMA) of the weights that a rank updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.optimizer.update_interval import BucketUpdate
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import Storage, in_spans
from shardwise.states.storage.storage_factory import StorageFactory


class Averages:
    """Exponential moving averages of the weights, in the master dtype.

    After each step, an average becomes decay x average + (1 - decay) x weight. Its initial value is
    the parameter's entry in `start` if there is one, otherwise the weight. `factory` creates the
    storage, which is accessed in the same spans as the optimizer's state.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: OptimizerState,
        decay: float,
        factory: StorageFactory,
        *,
        scattered: bool,
        start: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._decay = decay
        self._scattered = scattered
        self.storages = self._allocate(factory)
        """For each bucket, the average over this rank's interval."""
        for interval, average in self._each():
            for index, (first, _) in enumerate(interval.spans):
                value = average.take(index, fresh=True).copy_(interval.master.take(index))
                interval.master.put(index, changed=False)
                # Replace weights by restored averages where this span overlaps them.
                begin = interval.own[0] + first
                for piece in interval.bucket.pieces(begin, begin + value.numel()):
                    named = parameters.named[piece.parameter]
                    if start is not None and named.parameter in start:
                        flat = named.flattened(start[named.parameter])[piece.offset :]
                        value[piece.start - begin : piece.end - begin] = flat[: piece.numel]
                average.put(index, changed=True)

    def _allocate(self, factory: StorageFactory) -> list[Storage]:
        intervals = self._optimizer.intervals
        storages = factory.make(
            "averages",
            [interval.master.numel for interval in intervals],
            [
                (interval.master.dtype, self._parameters.kind(index)[1])
                for index, interval in enumerate(intervals)
            ],
        )
        pairs = zip(storages, intervals, strict=True)
        return [in_spans(storage, interval.spans) for storage, interval in pairs]

    def _each(self) -> Iterator[tuple[BucketUpdate, Storage]]:
        return zip(self._optimizer.intervals, self.storages, strict=True)

    def loaded(self) -> Iterator[Tensor]:
        """Yield each bucket's average over this rank's interval, as one tensor."""
        for average in self.storages:
            yield average.loaded()

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the averages that this rank stores, on any tier."""
        return sum(average.nbytes for average in self.storages)

    @property
    def memory_bytes(self) -> int:
        """Size in bytes of those averages that occupy memory between steps."""
        return sum(average.memory_bytes for average in self.storages)

    def update(self) -> None:
        """Update the averages. Call after each step that was not skipped."""
        for interval, average in self._each():
            for index in range(len(interval.spans)):
                # Read the next span from a disk while this one is updated.
                if index + 1 < len(interval.spans):
                    average.read_ahead(index + 1)
                value, master = average.take(index), interval.master.take(index)
                value.lerp_(master.to(value.device), 1.0 - self._decay)
                average.put(index, changed=True)
                interval.master.put(index, changed=False)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager inside which the parameters hold the averages. Collective.

        If a parameter and its average have the same dtype, the two swap values, span by span.
        Otherwise the parameter receives the rounded average. On exit, its value is then restored
        from its master.
        """
        self._exchange(_swap, _round)
        try:
            yield
        finally:
            with torch.no_grad():
                self._exchange(
                    _swap,
                    lambda interval, _, index: _round(interval, interval.master, index),
                )

    def _exchange(self, same_dtype: _Move, other_dtype: _Move) -> None:
        """Apply `same_dtype` to each parameter that has its average's dtype, else `other_dtype`.

        Collective.
        """
        self._parameters.meet()  # other ranks may still read the old values in shared memory
        for interval, average in self._each():
            move = same_dtype if interval.target.dtype == average.dtype else other_dtype
            for index in range(len(interval.spans)):
                move(interval, average, index)
        if self._scattered:
            # Start all gathers before waiting for any, so that they run in parallel.
            sent = [self._parameters.publish(i) for i in range(len(self.storages))]
            for handle in sent:
                handle.wait()
            # The caller may write to parameters next, so wait until no other rank reads them.
            for handle in sent:
                handle.reusable()
        self._parameters.settle()


_Move = Callable[[BucketUpdate, Storage, int], None]


def _swap(interval: BucketUpdate, average: Storage, index: int) -> None:
    # Swap one span at a time, so that the temporary copy stays small.
    target, value = interval.target.take(index), average.take(index)
    kept = target.clone()
    target.copy_(value)
    value.copy_(kept)
    interval.target.put(index, changed=True)
    average.put(index, changed=True)


def _round(interval: BucketUpdate, average: Storage, index: int) -> None:
    interval.target.take(index, fresh=True).copy_(average.take(index))
    interval.target.put(index, changed=True)
    average.put(index, changed=False)
