"""Keeps the anchor: what islands have in common of the parameters they train by themselves.

Each rank has it for a part of every bucket: its interval where optimizer state is sharded, else the
part that would be its interval, so that no two ranks of an island send the same. Values are in the
master dtype and rest where optimizer state does:

    value       the last common value
    velocity    of the outer update, where that has momentum
    residual    what the wire has lost so far, where it loses
    sent        what the master was when its difference was sent, where differences are late

The first two are alike on all islands, bit for bit: all compute them from the same bytes in the
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
from shardwise.layout.bucket_layout import Bucket
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.update_intervals import UpdateInterval
from shardwise.states.storage.storage import Span, Storage
from shardwise.states.storage.storage_factory import StorageFactory

VALUE, VELOCITY, RESIDUAL, SENT = "value", "velocity", "residual", "sent"

COMMON = (VALUE, VELOCITY)
"""What is alike on all islands; the rest is each island's own."""

Kept = Mapping[str, Mapping[nn.Parameter, Tensor]]
"""By key, whole tensors by parameter, to go on with."""


class Anchor:
    """The anchor of the parameters that this rank updates, and how differences change it.

    `group` shards the states, where `scattered`. `keys` says which of its tensors there are.
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
        """`start` gives the tensors of an earlier layout; without it the anchor is the weights."""
        self._parameters = parameters
        self._optimizer = optimizer
        self.rule = rule
        self._wire = Wire(rule.wire)
        self._group = group
        self._scattered = scattered
        self.keys = _keys(rule)
        self.parts = [self._part(interval) for interval in optimizer.intervals]
        """By bucket, the elements [first, end) that this rank makes equal."""
        self.storages = {key: self._room(key, factory) for key in self.keys}
        """By key and bucket."""
        self.restart()
        for key in self.keys:
            self._go_on(key, (start or {}).get(key, {}))

    def _part(self, interval: UpdateInterval) -> Span:
        return interval.own if self._scattered else interval.bucket.interval(self._group.rank)

    def _room(self, key: str, factory: StorageFactory) -> list[Storage]:
        kinds = [
            (interval.master.dtype, self.device(index))
            for index, interval in enumerate(self._optimizer.intervals)
        ]
        return factory.make(f"anchor: {key}", [end - first for first, end in self.parts], kinds)

    def restart(self) -> None:
        """Take the present weights as the last common value, which was reached without momentum."""
        for index in range(len(self.parts)):
            master = self._master(index)
            for key in self.keys:
                held = self.storages[key][index]
                held.store(torch.zeros_like(master) if key in (VELOCITY, RESIDUAL) else master)

    def forget_losses(self) -> None:
        """Take what the wire has lost for nothing: it is that of other islands."""
        for held in self.storages.get(RESIDUAL, ()):
            held.store(torch.zeros_like(held.loaded()))

    def _go_on(self, key: str, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Take what is known of `key` from `values`."""
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
        """What this rank's part of the masters is now."""
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
        """How far bucket `index` has come from the anchor, packed for the wire, (nbytes,) uint8.

        What the wire loses goes with the next one. Raises NonFiniteError.
        """
        master = self._master(index)
        difference = self._value(VALUE, index) - master
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
        """Let what was `packed` of bucket `index` move nothing: the next difference has it in it,
        and so is to have what the wire had lost before. Once anchor and weights have moved on, as
        without `late`, there is nothing to take back."""
        if not (self._wire.loses and self.rule.late):
            return
        residual = self._value(RESIDUAL, index)
        sent = self._wire.unpack(packed.to(residual.device), residual.numel(), residual.dtype)
        difference = self._value(VALUE, index) - self._value(SENT, index)
        self.storages[RESIDUAL][index].store(residual + sent.sub_(difference))

    def _refusal(self, index: int, difference: Tensor, error: ValueError) -> str:
        """Why a difference cannot be sent, with the first parameter at fault."""
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
        """The islands' mean difference of bucket `index`, from what each has packed, by weight."""
        held = self.storages[VALUE][index]
        parts = (self._wire.unpack(each.to(held.device), held.numel, held.dtype) for each in packed)
        return weighted_mean(parts, weights)

    def apply(self, index: int, mean: Tensor) -> None:
        """Move the anchor of bucket `index` by `mean`, and the weights to it; what was done since
        the difference was sent stays. Collective over the island; `publish` comes after."""
        value = self._value(VALUE, index)
        velocity = self._value(VELOCITY, index) if VELOCITY in self.keys else None
        self.rule.outer.move(value, mean, velocity)
        self._keep(VALUE, index, value)
        if velocity is not None:
            self._keep(VELOCITY, index, velocity)
        if self.rule.late:
            value = self._master(index) - self._value(SENT, index) + value
        self.write(index, value)

    def _keep(self, key: str, index: int, value: Tensor) -> None:
        _keep(self.storages[key][index], value)

    def write(self, index: int, value: Tensor) -> None:
        """Let `value` be this rank's part of the weights of bucket `index`. Collective over the
        island."""
        interval = self._optimizer.intervals[index]
        own = value if self._scattered else self.whole(index, value)
        interval.master.store(own)
        if interval.has_master:
            interval.target.store(own)

    def whole(self, index: int, part: Tensor) -> Tensor:
        """All of bucket `index`, from the parts of this island's ranks. Collective over it."""
        if self._group.size == 1:
            return part
        bucket, (first, end) = self._bucket(index), self.parts[index]
        flat = part.new_zeros(bucket.numel, device=self.device(index))
        flat[first:end] = part
        self._group.all_gather(flat, bucket.cuts).wait()
        return flat

    def device(self, index: int) -> torch.device:
        """Where messages about bucket `index` are sent from."""
        return self._parameters.kind(index)[1]

    def meet(self) -> None:
        """Before `apply` and `write`: return when no rank reads the old weights. Collective."""
        self._parameters.meet()

    def publish(self, indices: Sequence[int]) -> None:
        """Let all ranks of the island have what was written of these buckets. Collective."""
        handles = [self._parameters.publish(i) for i in indices] if self._scattered else []
        for handle in handles:
            handle.wait()
        for handle in handles:
            handle.reusable()
        self._parameters.settle()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the weights be the anchor inside the block; all ranks of the island enter and leave.

        They change places, so that afterwards each has its bits again.
        """
        self.swap()
        try:
            yield
        finally:
            with torch.no_grad():
                self.swap()

    def swap(self) -> None:
        """Let anchor and weights change places. Collective over the island."""
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
        """This rank's part of the anchor of bucket `index`."""
        return self._value(VALUE, index)

    # -- what there is ----------------------------------------------------------------------

    def loaded(self, key: str) -> Iterator[Tensor]:
        """By bucket, tensor `key` over what this rank updates. Collective over the island where
        states are replicated."""
        for index, held in enumerate(self.storages[key]):
            yield held.loaded() if self._scattered else self.whole(index, held.loaded())

    @property
    def state_bytes(self) -> int:
        """Bytes of the anchor that this rank keeps, wherever they rest."""
        return sum(held.nbytes for storages in self.storages.values() for held in storages)


def _keys(rule: IslandRule) -> tuple[str, ...]:
    found = [VALUE]
    found += [VELOCITY] if rule.outer.momentum else []
    found += [RESIDUAL] if Wire(rule.wire).loses else []
    found += [SENT] if rule.late else []
    return tuple(found)


def _keep(held: Storage, value: Tensor) -> None:
    """Store `value`, which may be the storage's own memory, changed in place."""
    if held.memory is None or held.memory.data_ptr() != value.data_ptr():
        held.store(value)


def weighted_mean(parts: Iterator[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of `parts` by `weights`, added in their order; by number where none weighs."""
    total = sum(weights)
    shares = [w / total for w in weights] if total else [1.0 / len(weights)] * len(weights)
    mean: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        mean = part.mul_(share) if mean is None else mean.add_(part, alpha=share)
    assert mean is not None, "there are islands"
    return mean
