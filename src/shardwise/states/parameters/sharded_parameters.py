"""Sharded parameters: each rank stores its own interval of every bucket and nothing else.

While a parameter is not gathered, it has a shape but no values, and `parameters_at_rest.py` makes
reads and writes raise. `residency.py` gathers the values when a forward or backward pass needs
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.comm import Handle, copied_places
from shardwise.errors import BrokenView
from shardwise.layout.bucket_layout import Bucket, Slot, Span
from shardwise.model.meta import make_real
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import ParameterPlaces, Parameters, check_place
from shardwise.states.parameters.parameters_at_rest import (
    SHARDED,
    AtRest,
    SwappingData,
    at_rest,
    unguarded,
    unmark,
)
from shardwise.states.parameters.read_only import read_only
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.storage.nf4_storage import NF4Storage
from shardwise.states.storage.storage import MemoryStorage, Storage
from shardwise.states.storage.storage_factory import StorageFactory


class ShardedParameters(Parameters):
    """Sharded parameters, trained and frozen. Each rank stores its own interval of every bucket.

    `sharded_buckets` lists the buckets of trained parameters in order, then those of frozen ones.
    `value_of` returns a parameter's initial value, in the parameter's shape. The parameters in
    `quantised` are stored in 4 bits. They share no bucket with other parameters.
    """

    at_rest_because = SHARDED
    """Text for messages: why a parameter has no values between forward and backward passes."""
    is_collective = True
    """False if each rank stores all values itself, so that ranks gather independently."""

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[Bucket],
        frozen: Sequence[NamedParameter],
        frozen_buckets: Sequence[Bucket],
        groups: ShardGroups,
        factory: StorageFactory,
        value_of: Callable[[NamedParameter], Tensor],
        quantised: Set[nn.Parameter] = frozenset(),
        *,
        copies: bool = False,
    ) -> None:
        super().__init__(named, buckets)
        self._group = groups.data
        self._copies = copies
        self._groups = groups
        self._watchers: list[Callable[[], None]] = []
        self._all = [*named, *frozen]
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._replaced: NamedParameter | None = None
        offset = len(named)
        shifted = [
            replace(
                bucket,
                slots=tuple(replace(s, parameter=s.parameter + offset) for s in bucket.slots),
            )
            for bucket in frozen_buckets
        ]
        self.sharded_buckets = self._make_buckets([*buckets, *shifted], factory, quantised)
        self._at_rest = {
            bucket: _BucketAtRest(
                [self._form_at_rest(slot.parameter) for slot in bucket.layout.slots]
            )
            for bucket in self.sharded_buckets
        }
        self._addresses = {bucket: rest.addresses for bucket, rest in self._at_rest.items()}
        self._places = {bucket: ParameterPlaces(bucket.named) for bucket in self.sharded_buckets}
        for index, bucket in enumerate(self.sharded_buckets):
            self._adopt(index, bucket, value_of)
        self.meet()
        self.remember()

    def _form_at_rest(self, number: int) -> AtRest:
        """Return the placeholder of parameter `number` while it is not gathered.

        Its data is a single NaN, expanded to the parameter's shape.
        """
        # One tensor holds the NaNs of all parameters with the same dtype and device, so that
        # `check` tests them in one call. Each parameter has a different address, because tools
        # recognise tied parameters by address.
        each = self._all[number]
        kind = (each.dtype, each.device)
        if kind not in self._nans:
            self._nans[kind] = torch.full(
                (len(self._all),), torch.nan, dtype=each.dtype, device=each.device
            )
        like = self._nans[kind][number].expand(each.shape)
        return at_rest(each.parameter, each.alias, like, self.at_rest_because)

    def _make_buckets(
        self, buckets: Sequence[Bucket], factory: StorageFactory, quantised: Set[nn.Parameter]
    ) -> list[ShardedBucket]:
        """Allocate this rank's interval of every bucket."""
        groups = [self._groups.of(bucket) for bucket in buckets]
        owns = [bucket.interval(group.rank) for bucket, group in zip(buckets, groups, strict=True)]
        named = [tuple(self._all[slot.parameter] for slot in b.slots) for b in buckets]
        kinds = [(each[0].dtype, each[0].device) for each in named]
        shared: list[Tensor | None] = [None] * len(buckets)
        # Shared memory would hold every bucket in full precision. All units are gathered in the
        # same way, so the other buckets do not use it either.
        if factory.is_device and not quantised:
            shared = [
                group.common(bucket.numel, *kind)
                for group, bucket, kind in zip(groups, buckets, kinds, strict=True)
            ]
            if any(common is None for common in shared):
                # A group of one rank always has common memory, but then the others gather.
                shared = [None] * len(buckets)
        lengths = [end - first for first, end in owns]
        storages: list[Storage] = [
            MemoryStorage(common[slice(*own)])
            for common, own in zip(shared, owns, strict=True)
            if common is not None
        ]
        if len(storages) < len(buckets):
            narrow = [each[0].parameter in quantised for each in named]
            full = [index for index, is_narrow in enumerate(narrow) if not is_narrow]
            some = [lengths[index] for index in full], [kinds[index] for index in full]
            made = iter(factory.make("parameters", *some))
            storages = [
                NF4Storage(length, *kind) if is_narrow else next(made)
                for length, kind, is_narrow in zip(lengths, kinds, narrow, strict=True)
            ]
        return [
            ShardedBucket(*parts)
            for parts in zip(buckets, named, owns, storages, shared, strict=True)
        ]

    def _adopt(
        self, index: int, bucket: ShardedBucket, value_of: Callable[[NamedParameter], Tensor]
    ) -> None:
        """Store this rank's interval of a bucket, and free the parameters' own memory."""
        _, dtype, device = bucket.kind
        own = _InitialInterval(bucket.own, dtype, device)
        intervals = [own]
        if self._copies:
            group = self._groups.of(bucket.layout)
            copied = bucket.layout.interval(copied_places(group).index(group.rank))
            intervals.append(_InitialInterval(copied, dtype, device))
        places = zip(bucket.named, bucket.layout.slots, self._at_rest[bucket].each, strict=True)
        for each, slot, rest in places:
            value = value_of(each)
            for interval in intervals:
                interval.take(each, slot, value)
            if each.parameter.is_meta:
                # Change the object in place, because the user's model and optimizer hold it.
                make_real(each.parameter, rest.like)
            with SwappingData():
                each.parameter.data = rest.value
            # Assign the class last: with the new class, setting `data` above would raise.
            each.parameter.__class__ = rest.kind
            rest.mark(each.parameter)
        bucket.storage.store(own.values)
        self.second_copies += [copied.values for copied in intervals[1:]]
        if index < len(self.buckets):
            for interval, kept in zip(intervals, (self.wide, self.wide_copies), strict=False):
                if interval.wide is not None:
                    kept[index] = interval.wide

    def part(self, index: int, own: Span) -> Storage:
        """Return this rank's interval of bucket `index`."""
        assert own == self.sharded_buckets[index].own
        return self.sharded_buckets[index].storage

    def kept(self) -> list[tuple[list[NamedParameter], Sequence[Slot], Span, Storage]]:
        return [
            (list(bucket.named), bucket.layout.slots, bucket.own, bucket.storage)
            for bucket in self.sharded_buckets
        ]

    def unshard(self, bucket: ShardedBucket, views: Sequence[Tensor], addresses: list[int]) -> None:
        """Set the parameters' data to `views`, one per slot, which start at `addresses`."""
        resting = self._at_rest[bucket]
        # User code cannot replace the data of a parameter at rest, because that raises. Check only
        # if some parameter is not at rest.
        if list(map(type, bucket.parameters)) != resting.kinds:
            with unguarded():
                self._note_replaced(bucket)
        with SwappingData():
            for parameter, view, own in zip(bucket.parameters, views, resting.owns, strict=True):
                parameter.__class__ = own
                parameter.data = view
        self._addresses[bucket] = addresses

    def allow_writes(self, bucket: ShardedBucket, *, allowed: bool) -> None:
        """Allow or forbid writes to the parameters of a gathered bucket."""
        resting = self._at_rest[bucket]
        kinds = resting.owns if allowed else resting.read_only
        for parameter, kind in zip(bucket.parameters, kinds, strict=True):
            parameter.__class__ = kind

    def reshard(self, bucket: ShardedBucket) -> None:
        """Remove the values of a bucket's parameters. Reading or writing them then raises."""
        resting = self._at_rest[bucket]
        with unguarded(), SwappingData():
            self._note_replaced(bucket)
            trios = zip(bucket.parameters, resting.values, resting.kinds, strict=True)
            for parameter, value, kind in trios:
                parameter.data = value
                parameter.__class__ = kind
        self._addresses[bucket] = resting.addresses

    def refuse_copies(self, bucket: ShardedBucket) -> None:
        """Make deepcopy and pickle of a bucket's parameters raise."""
        for parameter, rest in zip(bucket.parameters, self._at_rest[bucket].each, strict=True):
            rest.mark(parameter)

    def allow_copies(self, bucket: ShardedBucket) -> None:
        """Undo `refuse_copies`."""
        for parameter in bucket.parameters:
            unmark(parameter)

    def _note_replaced(self, bucket: ShardedBucket) -> None:
        """Record a parameter whose memory user code has replaced, for `check` to report."""
        now, then = list(map(Tensor.data_ptr, bucket.parameters)), self._addresses[bucket]
        if now != then:
            trios = zip(bucket.named, now, then, strict=True)
            self._replaced = next(each for each, a, b in trios if a != b)

    def publish(self, index: int, held: int | None = None) -> Handle:
        """No-op: a unit is gathered when it is needed."""
        del index
        return Handle()

    def settle(self) -> None:
        """Finish an update of all buckets. Wait until every rank may read shared memory."""
        with unguarded():
            super().settle()
        self.meet()
        for changed in self._watchers:
            changed()

    def meet(self) -> None:
        """Wait until all ranks have finished reading or writing memory that they share."""
        if any(bucket.common is not None for bucket in self.sharded_buckets):
            # Without the barrier, a rank could write its interval while another one still computes
            # with it.
            self._group.barrier()

    def watch(self, changed: Callable[[], None]) -> None:
        """Register a function to call after parameters have changed, once they are usable."""
        self._watchers.append(changed)

    def check(self) -> None:
        self.check_places()
        written = self._replaced
        for nans in self._nans.values():
            # Skip accelerators, where reading the result would make the host wait in every step.
            if nans.device.type == "cpu" and not bool(nans.isnan().all()):
                written = self._all[int((~nans.isnan()).nonzero()[0])]
                nans.fill_(torch.nan)  # raise only once
        # A write through an operation on the parameter increments its version, on every device.
        versions = self._versions_of_all()
        if versions != self._all_versions:
            pairs = zip(self._all, versions, self._all_versions, strict=True)
            *_, written = (each for each, now, then in pairs if now != then)
        if written is not None:
            raise self.lost_write_error(written)

    def note_written(self, number: int) -> None:
        """Record that user code wrote to a gathered copy of parameter `number`.

        `check` reports the write.
        """
        self._replaced = self._all[number]

    def check_unwritten(self, shown: Mapping[ShardedBucket, Tensor]) -> None:
        """Raise BrokenView if user code wrote to one of the read-only full buckets `shown`.

        Collective: each rank compares its own interval.
        """
        # All ranks must raise: a rank that continued would wait forever in its next gather.
        mine = [number for bucket, flat in shown.items() for number in bucket.written(flat)]
        for number in itertools.chain.from_iterable(self._group.gather_objects(mine)):
            raise self.lost_write_error(self._all[number])

    def forget_writes(self) -> None:
        self._replaced = None
        self.remember()

    def lost_write_error(self, named: NamedParameter) -> BrokenView:
        """Discard the record of lost writes, and return the error for a lost write to `named`."""
        self.forget_writes()
        return BrokenView(
            f"{named.alias} was written while {self.at_rest_because.partition(':')[0]}: the write "
            "changed a temporary copy and is lost. To write parameters: with "
            "engine.full_parameters(module, write=True)."
        )

    def remember(self) -> None:
        with unguarded():
            super().remember()
        self._all_versions = self._versions_of_all()

    def _versions_of_all(self) -> list[int]:
        with unguarded():
            return [each.parameter._version for each in self._all]

    def written(self) -> set[int]:
        with unguarded():
            return super().written()

    def check_places(self) -> None:
        """Raise BrokenView if user code replaced a parameter. Each replacement is reported once."""
        with unguarded():
            for bucket, places in self._places.items():
                addresses = self._addresses[bucket]
                if not places.are_kept(addresses):
                    # The next use of the unit repairs the parameter, so it must not raise a second
                    # time.
                    self._addresses[bucket] = [p.data_ptr() for p in bucket.parameters]
                    for named, address in zip(bucket.named, addresses, strict=True):
                        check_place(named, address)

    def release(self, values: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Move each parameter's full value back to separate memory.

        Collective, unless `values` provides the full values.
        """
        for bucket in self.sharded_buckets:
            if values is None:
                flat = self.gathered(bucket)
                assert flat is not None
                fresh = [v.clone(memory_format=torch.preserve_format) for v in bucket.views(flat)]
            else:
                fresh = [values[each.parameter].to(each.dtype) for each in bucket.named]
            self.unshard(bucket, fresh, [])
            self.allow_copies(bucket)

    def gathered(self, bucket: ShardedBucket, *, here: bool = True) -> Tensor | None:
        """Gather a bucket into new memory. Collective.

        Returns None on a rank whose `here` is False.
        """
        if bucket.common is not None:
            # Copy, because the caller may write to the result while other ranks read the shared
            # memory.
            return bucket.common.clone() if here else None
        numel, dtype, device = bucket.kind
        flat = torch.zeros(numel, dtype=dtype, device=device)
        bucket.load(flat)
        # A rank that does not need the result still sends its interval.
        self._groups.of(bucket.layout).all_gather(flat, bucket.layout.cuts).wait()
        return flat if here else None

    def held_bytes(self, index: int) -> int:
        """Return the size in bytes of this rank's interval of bucket `index`."""
        return self.sharded_buckets[index].storage.nbytes

    def frozen_bytes(self) -> list[tuple[Sequence[NamedParameter], int]]:
        """Return each frozen bucket's parameters, with the number of bytes stored on this rank."""
        return [(bucket.named, bucket.storage.nbytes) for bucket in self.frozen]

    @property
    def frozen(self) -> Sequence[ShardedBucket]:
        return self.sharded_buckets[len(self.buckets) :]


class _InitialInterval:
    """The initial values of a bucket's elements `own`.

    `wide` is set if any of the values has a wide dtype.
    """

    def __init__(self, own: Span, dtype: torch.dtype, device: torch.device) -> None:
        self._own = own
        # Initialise with zeros, because the padding is stored and gathered, too.
        self.values = torch.zeros(own[1] - own[0], dtype=dtype, device=device)
        self.wide: Tensor | None = None

    def take(self, named: NamedParameter, slot: Slot, value: Tensor) -> None:
        """Copy the part of `value` in this interval. `value` belongs to the parameter in `slot`."""
        first, end = self._own
        low, high = max(slot.start, first), min(slot.end, end)
        if low >= high:
            return
        part = named.flattened(value)[low - slot.start : high - slot.start]
        place = slice(low - first, high - first)
        self.values[place] = part
        # A value wider than the parameter is the better initial value for an fp32 master weight.
        if value.dtype != self.values.dtype:
            self.wide = self.values.to(value.dtype) if self.wide is None else self.wide
            self.wide[place] = part


class _BucketAtRest:
    """The placeholders of a bucket's parameters, one per slot."""

    def __init__(self, each: list[AtRest]) -> None:
        # One list per attribute, because every forward pass reads an attribute of all parameters.
        self.each = each
        self.values = [rest.value for rest in each]
        self.kinds = [rest.kind for rest in each]
        self.owns = [rest.own for rest in each]
        self.read_only = [read_only(rest.own) for rest in each]
        self.addresses = [rest.like.data_ptr() for rest in each]
