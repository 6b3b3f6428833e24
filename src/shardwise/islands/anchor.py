"""Keeps the anchor: the last common values of the parameters that islands train by themselves.

Each rank has the anchor of its interval of every bucket, whether or not optimizer state is sharded,
so that no two ranks of an island send the same. Its tensors are in the master dtype, on the tier of
the optimizer state:

    value       the last common value
    velocity    of the outer update, if that has momentum
    residual    what the wire has lost so far, if it loses
    sent        the master when its difference was sent, if differences are used late

All islands have the same bits of the first two, since they compute them from the same bytes in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.config.outer_optimizer import IslandRule
from shardwise.errors import NonFiniteError
from shardwise.islands.wire import Wire
from shardwise.layout import fingerprints
from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.step_hooks import Kept
from shardwise.states.storage.storage import Storage
from shardwise.states.storage.storage_factory import StorageFactory

VALUE, VELOCITY, RESIDUAL, SENT = "value", "velocity", "residual", "sent"


class Anchor:
    """The anchor of the parameters that this rank updates, and the outer update.

    Args:
        rule: How islands average.
        factory: Makes the storage of the tensors.
        group: The ranks that shard the states.
        scattered: Whether the optimizer state is sharded.
        start: Tensors of an earlier layout. Without them the anchor is the weights.

    Attributes:
        keys: The keys of the tensors that there are.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: OptimizerState,
        rule: IslandRule,
        factory: StorageFactory,
        group: Collectives,
        *,
        scattered: bool,
        start: Kept | None = None,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self.rule = rule
        self._wire = Wire(rule.wire)
        self._group = group
        self._scattered = scattered
        self.keys = [VALUE]
        self.keys += [VELOCITY] if rule.outer.momentum else []
        self.keys += [RESIDUAL] if self._wire.loses else []
        self.keys += [SENT] if rule.late else []
        self.parts: list[Span] = [
            interval.own if scattered else interval.bucket.interval(group.rank)
            for interval in optimizer.intervals
        ]
        """By bucket, the elements [first, end) of which this rank sends the differences."""
        lengths = [end - first for first, end in self.parts]
        kinds = [
            (interval.master.dtype, self.device(index))
            for index, interval in enumerate(optimizer.intervals)
        ]
        self.storages = {key: factory.make(f"anchor: {key}", lengths, kinds) for key in self.keys}
        """By key and bucket."""
        self.restart()
        for key in self.keys:
            self._go_on(key, (start or {}).get(key, {}))

    def restart(self) -> None:
        """Set the anchor to the present weights, and velocity and residual to zero."""
        for index in range(len(self.parts)):
            master = self._master(index)
            for key in self.keys:
                held = self.storages[key][index]
                held.store(torch.zeros_like(master) if key in (VELOCITY, RESIDUAL) else master)

    def forget_losses(self) -> None:
        """Clear what the wire has lost, after a load of the losses of another island."""
        for held in self.storages.get(RESIDUAL, ()):
            held.store(torch.zeros_like(held.loaded()))

    def _go_on(self, key: str, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the tensors of `key` to `values`, as far as there are any."""
        for index, (first, end) in enumerate(self.parts):
            held = self.storages[key][index]
            value = held.loaded()
            for piece in self._bucket(index).pieces(first, end):
                named = self._parameters.named[piece.parameter]
                if named.parameter in values:
                    flat = named.flattened(values[named.parameter])[piece.offset :]
                    length = piece.end - piece.start
                    value[piece.start - first :][:length] = flat[:length]
            _keep(held, value)

    def _bucket(self, index: int) -> Bucket:
        return self._optimizer.intervals[index].bucket

    def _master(self, index: int) -> Tensor:
        """Return this rank's part of the present masters."""
        interval, (first, end) = self._optimizer.intervals[index], self.parts[index]
        return interval.master.loaded()[first - interval.own[0] : end - interval.own[0]]

    def _value(self, key: str, index: int) -> Tensor:
        return self.storages[key][index].loaded()

    # -- what is sent and what comes --------------------------------------------------------

    def nbytes(self, index: int) -> int:
        """Bytes of a packed difference of bucket `index`."""
        held = self.storages[VALUE][index]
        return self._wire.nbytes(held.numel, held.dtype)

    def pack(self, index: int) -> Tensor:
        """Return the difference between anchor and masters of bucket `index`, (nbytes,) uint8.

        What the wire loses is added to the next difference. Raises NonFiniteError.
        """
        master = self._master(index)
        difference = self._value(VALUE, index) - master
        # Error feedback: rounding errors are sent later instead of adding up.
        if self._wire.loses:
            difference.add_(self._value(RESIDUAL, index))
        try:
            packed = self._wire.pack(difference)
        except ValueError as error:
            raise NonFiniteError(self._refusal(index, difference, error)) from None
        if self._wire.loses:
            back = self._wire.unpack(packed, difference.numel(), difference.dtype)
            self.storages[RESIDUAL][index].store(difference.sub_(back))
        if self.rule.late:
            self.storages[SENT][index].store(master)
        return packed

    def take_back(self, index: int, packed: Tensor) -> None:
        """Restore the residual of bucket `index` as it was before `packed` was made.

        For differences that are dropped in transit: the anchor has not moved, so the next
        difference contains them.
        """
        # Without `late` a difference has moved the anchor before anybody could drop it.
        if not (self._wire.loses and self.rule.late):
            return
        residual = self._value(RESIDUAL, index)
        sent = self._wire.unpack(packed.to(residual.device), residual.numel(), residual.dtype)
        difference = self._value(VALUE, index) - self._value(SENT, index)
        self.storages[RESIDUAL][index].store(residual + sent.sub_(difference))

    def _refusal(self, index: int, difference: Tensor, error: ValueError) -> str:
        """Say why a difference cannot be sent, with the first parameter at fault."""
        start = self.parts[index][0]
        names = [
            self._parameters.named[piece.parameter].name
            for piece in self._bucket(index).pieces(*self.parts[index])
            if not self._wire.holds(difference[piece.start - start : piece.end - start])
        ]
        return (
            f"How far {names[0]} has come since islands were equal has {error} in it, which no "
            "other island is to get. Look at what the optimizer made of it: a rate that is too "
            "high, or weights that were written."
        )

    def mean(self, index: int, packed: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of the islands' differences of bucket `index`."""
        held = self.storages[VALUE][index]
        parts = (self._wire.unpack(each.to(held.device), held.numel, held.dtype) for each in packed)
        return weighted_mean(parts, weights)

    def apply(self, index: int, mean: Tensor) -> None:
        """Move the anchor of bucket `index` by the `mean` difference, and the weights with it.

        With `late`, the updates since the difference was sent stay. Collective over the island;
        call `publish` afterwards.
        """
        value = self._value(VALUE, index)
        velocity = self._value(VELOCITY, index) if VELOCITY in self.keys else None
        self.rule.outer.move(value, mean, velocity)
        self._keep(VALUE, index, value)
        if velocity is not None:
            self._keep(VELOCITY, index, velocity)
        if self.rule.late:
            # The updates since the difference was sent are not in it: they stay on top.
            value = self._master(index) - self._value(SENT, index) + value
        self.write(index, value)

    def _keep(self, key: str, index: int, value: Tensor) -> None:
        _keep(self.storages[key][index], value)

    def write(self, index: int, value: Tensor) -> None:
        """Set this rank's part of the weights of bucket `index` to `value`. Collective over the
        island."""
        interval = self._optimizer.intervals[index]
        own = value if self._scattered else self.whole(index, value)
        interval.master.store(own)
        if interval.has_master:
            interval.target.store(own)

    def whole(self, index: int, part: Tensor) -> Tensor:
        """Return all of bucket `index` from this rank's `part`. Collective over the island."""
        if self._group.size == 1:
            return part
        bucket, (first, end) = self._bucket(index), self.parts[index]
        flat = part.new_zeros(bucket.numel, device=self.device(index))
        flat[first:end] = part
        self._group.all_gather(flat, bucket.cuts).wait()
        return flat

    def device(self, index: int) -> torch.device:
        """The device of messages about bucket `index`."""
        return self._parameters.kind(index)[1]

    def meet(self) -> None:
        """Wait until no rank reads the old weights, before `apply` and `write`. Collective."""
        self._parameters.meet()

    def publish(self, indices: Sequence[int]) -> None:
        """Gather what was written of these buckets on all ranks of the island. Collective."""
        # Replicated states were written on every rank by `write`. All gathers start before the
        # first wait, so that they overlap.
        handles = [self._parameters.publish(i) for i in indices] if self._scattered else []
        for handle in handles:
            handle.wait()
        for handle in handles:
            handle.reusable()
        self._parameters.settle()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager: the weights are the anchor inside it. All ranks of the island enter and
        leave.

        Weights and anchor are exchanged, so that both have their bits again afterwards.
        """
        self.swap()
        try:
            yield
        finally:
            with torch.no_grad():
                self.swap()

    def swap(self) -> None:
        """Exchange anchor and weights. Collective over the island."""
        self.meet()
        for index in range(len(self.parts)):
            mine, value = self._master(index).clone(), self._value(VALUE, index)
            self.write(index, value)
            self.storages[VALUE][index].store(mine)
        self.publish(range(len(self.parts)))

    @property
    def is_reached(self) -> bool:
        """Whether the weights of this rank are the anchor, bit for bit."""
        return all(
            torch.equal(self._master(index), self._value(VALUE, index))
            for index in range(len(self.parts))
        )

    def checksum(self) -> int:
        """32 bits of this rank's part of the anchor: equal on the ranks of equal place in all
        islands."""
        several = [fingerprints.sums_of(self._value(VALUE, i)) for i in range(len(self.parts))]
        return crc32(repr(several).encode())

    def loaded_value(self, index: int) -> Tensor:
        """Return this rank's part of the anchor of bucket `index`."""
        return self._value(VALUE, index)

    # -- what there is ----------------------------------------------------------------------

    def loaded(self, key: str) -> Iterator[Tensor]:
        """Yield by bucket the tensor `key` over what this rank updates. Collective over the island
        if states are replicated."""
        for index, held in enumerate(self.storages[key]):
            yield held.loaded() if self._scattered else self.whole(index, held.loaded())

    @property
    def state_bytes(self) -> int:
        """Bytes of the anchor that this rank keeps, on any tier."""
        return sum(held.nbytes for storages in self.storages.values() for held in storages)


def _keep(held: Storage, value: Tensor) -> None:
    """Store `value`."""
    # In memory, `loaded` returned the storage itself, which was changed in place.
    if held.memory is None or held.memory.data_ptr() != value.data_ptr():
        held.store(value)


def weighted_mean(parts: Iterator[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of `parts` by `weights`, added in their order; if all weights are 0, the
    plain mean."""
    total = sum(weights)
    shares = [w / total for w in weights] if total else [1.0 / len(weights)] * len(weights)
    mean: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        mean = part.mul_(share) if mean is None else mean.add_(part, alpha=share)
    assert mean is not None, "there are islands"
    return mean
