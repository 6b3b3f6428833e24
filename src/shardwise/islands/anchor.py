"""Stores the anchor: the last common values of the parameters that islands train separately.

Each rank stores one interval of every bucket, even if the optimizer state is replicated, so that no
two ranks of an island send the same elements. The anchor's tensors have the dtype of the master
weights, and are stored on the optimizer state's tier:

    value       the last common value
    velocity    the outer update's velocity, if it has momentum
    residual    rounding errors that have not been sent yet, if the wire format rounds
    sent        the master weights when their difference was sent, if `late` is positive

`value` and `velocity` are bit-identical on all islands, because every island computes them from the
same bytes in the same order.
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
    """Stores the anchor of the parameters that this rank updates, and applies outer updates to it.

    Args:
        rule: When and how islands average.
        factory: Creates the storage for the anchor's tensors.
        group: The ranks that shard the states.
        scattered: True if the optimizer state is sharded, False if it is replicated.
        start: The anchor's tensors from an earlier layout of the states, or None to start from the
            current weights.

    Attributes:
        keys: Names of the allocated tensors: "value" and, if needed, "velocity", "residual" and
            "sent".
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
        # Do not allocate tensors that this rule does not use.
        self.keys = [VALUE]
        self.keys += [VELOCITY] if rule.outer.momentum else []
        self.keys += [RESIDUAL] if self._wire.loses else []
        self.keys += [SENT] if rule.late else []
        self.parts: list[Span] = [
            # If states are replicated, use the interval that this rank would own if they were
            # sharded.
            interval.own if scattered else interval.bucket.interval(group.rank)
            for interval in optimizer.intervals
        ]
        """Per bucket, the range [first, end) of elements whose differences this rank sends."""
        lengths = [end - first for first, end in self.parts]
        kinds = [
            (interval.master.dtype, self.device(index))
            for index, interval in enumerate(optimizer.intervals)
        ]
        self.storages = {key: factory.make(f"anchor: {key}", lengths, kinds) for key in self.keys}
        """The storage of each tensor, by key and bucket."""
        self.restart()
        for key in self.keys:
            self._restore(key, (start or {}).get(key, {}))

    def restart(self) -> None:
        """Set the anchor to the current weights, and the velocity and the residual to zero."""
        for index in range(len(self.parts)):
            master = self._master(index)
            for key in self.keys:
                storage = self.storages[key][index]
                storage.store(torch.zeros_like(master) if key in (VELOCITY, RESIDUAL) else master)

    def forget_losses(self) -> None:
        """Set the residual to zero, because it was loaded from another island's state."""
        for storage in self.storages.get(RESIDUAL, ()):
            storage.store(torch.zeros_like(storage.loaded()))

    def _restore(self, key: str, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the tensor `key` to the given `values`, which may cover only some parameters."""
        for index, (first, end) in enumerate(self.parts):
            storage = self.storages[key][index]
            value = storage.loaded()
            for piece in self._bucket(index).pieces(first, end):
                named = self._parameters.named[piece.parameter]
                # Look up values by parameter, because the new layout may have different buckets.
                if named.parameter in values:
                    flat = named.flattened(values[named.parameter])[piece.offset :]
                    length = piece.end - piece.start
                    value[piece.start - first :][:length] = flat[:length]
            _keep(storage, value)

    def _bucket(self, index: int) -> Bucket:
        return self._optimizer.intervals[index].bucket

    def _master(self, index: int) -> Tensor:
        """Return this rank's part of bucket `index`'s current master weights."""
        interval, (first, end) = self._optimizer.intervals[index], self.parts[index]
        return interval.master.loaded()[first - interval.own[0] : end - interval.own[0]]

    def _value(self, key: str, index: int) -> Tensor:
        return self.storages[key][index].loaded()

    # -- differences --------------------------------------------------------------------------

    def nbytes(self, index: int) -> int:
        """Return the size in bytes of bucket `index`'s packed difference."""
        storage = self.storages[VALUE][index]
        return self._wire.nbytes(storage.numel, storage.dtype)

    def pack(self, index: int) -> Tensor:
        """Pack the difference between bucket `index`'s anchor and master weights, (nbytes,) uint8.

        The wire format's rounding errors are added to the next difference. Raises NonFiniteError if
        the format cannot represent a value.
        """
        master = self._master(index)
        difference = self._value(VALUE, index) - master
        # Error feedback: rounding errors are sent with the next difference, so they do not
        # accumulate.
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
        """Restore bucket `index`'s residual to its value before `packed` was computed.

        Call this for a difference that is dropped in transit. The anchor has not changed, so the
        next difference includes the dropped one.
        """
        # If `late` is 0, a difference is applied to the anchor before anything can drop it.
        if not (self._wire.loses and self.rule.late):
            return
        residual = self._value(RESIDUAL, index)
        # residual = difference + old residual - sent. Solve for the old residual.
        sent = self._wire.unpack(packed.to(residual.device), residual.numel(), residual.dtype)
        difference = self._value(VALUE, index) - self._value(SENT, index)
        self.storages[RESIDUAL][index].store(residual + sent.sub_(difference))

    def _refusal(self, index: int, difference: Tensor, error: ValueError) -> str:
        """Return the error message for a difference that cannot be sent.

        It names the first parameter whose difference the wire format cannot represent.
        """
        start = self.parts[index][0]
        names = [
            self._parameters.named[piece.parameter].name
            for piece in self._bucket(index).pieces(*self.parts[index])
            if not self._wire.holds(difference[piece.start - start : piece.end - start])
        ]
        return (
            f"The difference of {names[0]} to its last common value contains {error}, so it was "
            "not sent to the other islands. Check the optimizer's updates: the learning rate may "
            "be too high, or user code may have written the weights."
        )

    def mean(self, index: int, packed: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of all islands' packed differences for bucket `index`."""
        storage = self.storages[VALUE][index]
        parts = (
            self._wire.unpack(each.to(storage.device), storage.numel, storage.dtype)
            for each in packed
        )
        return weighted_mean(parts, weights)

    def apply(self, index: int, mean: Tensor) -> None:
        """Apply the mean difference `mean` to bucket `index`'s anchor and weights.

        If the rule's `late` is positive, updates made since the difference was sent are preserved.
        Collective over the island. Call `publish` afterwards.
        """
        value = self._value(VALUE, index)
        velocity = self._value(VELOCITY, index) if VELOCITY in self.keys else None
        self.rule.outer.move(value, mean, velocity)
        self._keep(VALUE, index, value)
        if velocity is not None:
            self._keep(VELOCITY, index, velocity)
        if self.rule.late:
            # The difference does not include updates made since it was sent, so add them again.
            value = self._master(index) - self._value(SENT, index) + value
        self.write(index, value)

    def _keep(self, key: str, index: int, value: Tensor) -> None:
        _keep(self.storages[key][index], value)

    def write(self, index: int, value: Tensor) -> None:
        """Write `value` to this rank's part of bucket `index`'s weights.

        Collective over the island.
        """
        interval = self._optimizer.intervals[index]
        own = value if self._scattered else self.whole(index, value)
        interval.master.store(own)
        # If there is no separate master copy, the parameters themselves are the master weights.
        if interval.has_master:
            interval.target.store(own)

    def whole(self, index: int, part: Tensor) -> Tensor:
        """Gather the full bucket `index` from the ranks' parts. Collective over the island."""
        if self._group.size == 1:
            return part
        bucket, (first, end) = self._bucket(index), self.parts[index]
        flat = part.new_zeros(bucket.numel, device=self.device(index))
        flat[first:end] = part
        self._group.all_gather(flat, bucket.cuts).wait()
        return flat

    def device(self, index: int) -> torch.device:
        """Return the device of bucket `index`'s messages."""
        return self._parameters.kind(index)[1]

    def meet(self) -> None:
        """Wait until no rank reads the old weights. Collective.

        Call this before `apply` and `write`.
        """
        self._parameters.meet()

    def publish(self, indices: Sequence[int]) -> None:
        """All-gather the weights that `write` has stored, for the buckets `indices`.

        Collective over the island.
        """
        # If states are replicated, `write` has already written the full bucket on every rank. Start
        # all gathers before the first wait, so that they overlap.
        handles = [self._parameters.publish(i) for i in indices] if self._scattered else []
        for handle in handles:
            handle.wait()
        for handle in handles:
            handle.reusable()
        self._parameters.settle()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Return a context manager inside which the weights equal the anchor.

        Weights and anchor are swapped, so that both have exactly their old values after the block.
        Collective over the island.
        """
        self.swap()
        try:
            yield
        finally:
            with torch.no_grad():
                self.swap()

    def swap(self) -> None:
        """Swap anchor and weights. Collective over the island."""
        self.meet()
        for index in range(len(self.parts)):
            # Clone, because `write` overwrites the master weights.
            weights, value = self._master(index).clone(), self._value(VALUE, index)
            self.write(index, value)
            self.storages[VALUE][index].store(weights)
        self.publish(range(len(self.parts)))

    @property
    def is_reached(self) -> bool:
        """True if this rank's weights are bit-identical to the anchor."""
        return all(
            torch.equal(self._master(index), self._value(VALUE, index))
            for index in range(len(self.parts))
        )

    def checksum(self) -> int:
        """Return a 32-bit checksum of this rank's part of the anchor, identical on its peers."""
        sums = [fingerprints.sums_of(self._value(VALUE, i)) for i in range(len(self.parts))]
        return crc32(repr(sums).encode())

    def loaded_value(self, index: int) -> Tensor:
        """Return this rank's part of bucket `index`'s anchor."""
        return self._value(VALUE, index)

    # -- for checkpoints ----------------------------------------------------------------------

    def loaded(self, key: str) -> Iterator[Tensor]:
        """Yield each bucket's tensor `key`, restricted to the elements that this rank updates.

        Collective over the island if states are replicated.
        """
        for index, storage in enumerate(self.storages[key]):
            yield storage.loaded() if self._scattered else self.whole(index, storage.loaded())

    @property
    def state_bytes(self) -> int:
        """Total size in bytes of this rank's part of the anchor, over all tiers."""
        return sum(storage.nbytes for storages in self.storages.values() for storage in storages)


def _keep(storage: Storage, value: Tensor) -> None:
    # If the storage is in memory, `loaded` returned its own tensor, which was modified in place.
    if storage.memory is None or storage.memory.data_ptr() != value.data_ptr():
        storage.store(value)


def weighted_mean(parts: Iterator[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of `parts` weighted by `weights`, or the plain mean if all weights are 0.

    Parts are added in order, so the result is bit-identical every time.
    """
    total = sum(weights)
    shares = [w / total for w in weights] if total else [1.0 / len(weights)] * len(weights)
    mean: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        mean = part.mul_(share) if mean is None else mean.add_(part, alpha=share)
    assert mean is not None, "there are islands"
    return mean
