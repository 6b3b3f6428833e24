"""Keeps an exponential moving average of the weights (EMA) on the intervals that a rank updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.update_intervals import UpdateInterval
from shardwise.states.storage.storage import Storage, in_spans
from shardwise.states.storage.storage_factory import StorageFactory


class Averages:
    """Averages of the weights: decay x average + (1 - decay) x weight after each step, in the
    master dtype."""

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
        """`factory` makes their storage, by spans as the optimizer's state. `start` gives averages
        to go on with, by parameter; without it they are the weights."""
        self._parameters = parameters
        self._optimizer = optimizer
        self._decay = decay
        self._scattered = scattered
        self._shelf = factory
        self.storages = self._room()
        """By bucket, the average over this rank's interval."""
        for interval, average in self._each():
            for index, (first, _) in enumerate(interval.spans):
                value = average.take(index, fresh=True).copy_(interval.master.take(index))
                interval.master.put(index, changed=False)
                self._fill(interval, interval.own[0] + first, value, start or {})
                average.put(index, changed=True)

    def _room(self) -> list[Storage]:
        parts = self._optimizer.intervals
        rooms = self._shelf.make(
            "averages",
            [interval.master.numel for interval in parts],
            [
                (interval.master.dtype, self._parameters.kind(i)[1])
                for i, interval in enumerate(parts)
            ],
        )
        return [in_spans(room, interval.spans) for room, interval in zip(rooms, parts, strict=True)]

    def _fill(
        self,
        interval: UpdateInterval,
        first: int,
        value: Tensor,
        start: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """Let `value`, the elements of the bucket from `first` on, go on with those of `start`."""
        for piece in interval.bucket.pieces(first, first + value.numel()):
            named = self._parameters.named[piece.parameter]
            if named.parameter in start:
                flat = named.flattened(start[named.parameter])[piece.offset :]
                length = piece.end - piece.start
                value[piece.start - first :][:length] = flat[:length]

    def _each(self) -> Iterator[tuple[UpdateInterval, Storage]]:
        return zip(self._optimizer.intervals, self.storages, strict=True)

    def loaded(self) -> Iterator[Tensor]:
        """By bucket, the average over this rank's interval, whole."""
        for average in self.storages:
            yield average.loaded()

    @property
    def state_bytes(self) -> int:
        """Bytes of averages that this rank keeps, wherever they rest."""
        return sum(average.nbytes for average in self.storages)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that they take between steps."""
        return sum(average.memory_bytes for average in self.storages)

    def update(self) -> None:
        """Follow the weights; after each step that was not skipped."""
        for interval, average in self._each():
            for index in range(len(interval.spans)):
                if index + 1 < len(interval.spans):
                    average.read_ahead(index + 1)
                value, master = average.take(index), interval.master.take(index)
                value.lerp_(master.to(value.device), 1.0 - self._decay)
                average.put(index, changed=True)
                interval.master.put(index, changed=False)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the parameters hold the averages inside the block; all ranks enter and leave.

        They change places, span by span. A parameter of another dtype has a master, which it is
        taken from again.
        """
        self._exchange(_exchanged, _rounded)
        try:
            yield
        finally:
            with torch.no_grad():
                self._exchange(_exchanged, _restored)

    def _exchange(self, alike: _Move, unlike: _Move) -> None:
        """Change every parameter, those of the average's dtype by `alike`. Collective."""
        self._parameters.meet()
        for interval, average in self._each():
            move = alike if interval.target.dtype == average.dtype else unlike
            for index in range(len(interval.spans)):
                move(interval, average, index)
        if self._scattered:
            sent = [self._parameters.publish(i) for i in range(len(self.storages))]
            for handle in sent:
                handle.wait()
            # The block may write parameters, which other ranks still read until then.
            for handle in sent:
                handle.reusable()
        self._parameters.settle()


_Move = Callable[[UpdateInterval, Storage, int], None]


def _exchanged(interval: UpdateInterval, average: Storage, index: int) -> None:
    target, value = interval.target.take(index), average.take(index)
    kept = target.clone()
    target.copy_(value)
    value.copy_(kept)
    interval.target.put(index, changed=True)
    average.put(index, changed=True)


def _rounded(interval: UpdateInterval, average: Storage, index: int) -> None:
    interval.target.take(index, fresh=True).copy_(average.take(index))
    interval.target.put(index, changed=True)
    average.put(index, changed=False)


def _restored(interval: UpdateInterval, average: Storage, index: int) -> None:
    _rounded(interval, interval.master, index)
