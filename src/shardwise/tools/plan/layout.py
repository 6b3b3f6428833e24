"""Computes the bytes of the three states on each rank, from the layout that the engine itself uses.

Pure arithmetic over a StepRecord. It uses the same buckets, splits and rules as `engine.build`, so
the result equals `engine.describe()` to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import bucket_layout
from shardwise.layout.bucket_layout import Bucket, Spec
from shardwise.layout.placement import STATES, Placement
from shardwise.states.storage.storage import SPAN
from shardwise.tools.plan.record import GroupRecord, ParameterRecord, StepRecord

NARROW = ("bfloat16", "float16")
"""Dtypes that have an fp32 master."""

FP32 = 4


@dataclass(frozen=True)
class LaidBucket:
    """A bucket with the dtype, unit and group of its parameters (group None if frozen)."""

    layout: Bucket
    itemsize: int
    dtype: str
    unit: int
    group: GroupRecord | None

    @property
    def nbytes(self) -> int:
        """The bytes of the whole bucket, in the dtype of its parameters."""
        return self.layout.numel * self.itemsize

    def share(self, rank: int) -> int:
        """Return the number of elements that `rank` owns."""
        first, end = self.layout.interval(rank)
        return end - first

    @property
    def master_size(self) -> int:
        """The bytes of an element in the dtype of the update."""
        return FP32 if self.dtype in NARROW else self.itemsize


@dataclass(frozen=True)
class StateLayout:
    """The buckets of a record under the row `row`, over `ranks` ranks.

    `apart`: devices do not share the host's memory, so the tier `cpu` is separate.
    """

    record: StepRecord
    row: Placement
    ranks: int
    buckets: tuple[LaidBucket, ...]
    frozen: tuple[LaidBucket, ...]
    apart: bool

    def bytes_by_state(self, rank: int) -> dict[str, int]:
        """Return the bytes on `rank` by name of STATES, on any tier, as in `engine.describe()`.

        Optimizer state counts as if every optimizer had already created it.
        """
        sizes = zip(*(self.bucket_bytes(bucket, rank) for bucket in self.buckets), strict=True)
        by_state = dict(zip(STATES, map(sum, sizes), strict=True))
        by_state["parameters"] += sum(each.share(rank) * each.itemsize for each in self.frozen)
        return by_state

    def bucket_bytes(self, bucket: LaidBucket, rank: int) -> tuple[int, int, int]:
        """Return the bytes of one bucket, in the order of STATES."""
        share = bucket.share(rank)
        updated = share if self.row.is_sharded("optimizer") else bucket.layout.numel
        held = share if self.row.is_sharded("parameters") else bucket.layout.numel
        # Sharded gradients are kept only for the shard that this rank updates.
        kept = updated if self.row.is_sharded("gradients") else bucket.layout.numel
        # Gradients on a disk are summed there, so they are kept in fp32.
        on_disk = self.row.tier("gradients").kind == "nvme" and self.row.is_sharded("gradients")
        wide = on_disk and bucket.dtype in NARROW
        assert bucket.group is not None
        mastered = self._has_master(bucket)
        size = bucket.master_size if mastered else bucket.itemsize
        # The master belongs to the optimizer state.
        optimizer = updated * size * (len(bucket.group.moments) + mastered)
        return held * bucket.itemsize, kept * (FP32 if wide else bucket.itemsize), optimizer

    def _has_master(self, bucket: LaidBucket) -> bool:
        """Return whether the update works on a copy: wider, or in other memory than the model."""
        optimizer, parameters = self.row.tier("optimizer"), self.row.tier("parameters")
        away = [self.apart and tier.kind != "device" for tier in (optimizer, parameters)]
        return bucket.dtype in NARROW or away[0] != away[1]

    def staging_bytes(self, rank: int) -> int:
        """Return the bytes of the memory through which a disk's states of `rank` are accessed.

        For each state tensor in use at once it holds three spans, plus a spare one
        (storage_factory).
        """
        return sum(self._staging(state, rank) for state in STATES)

    def _staging(self, state: str, rank: int) -> int:
        if self.row.tier(state).kind != "nvme":
            return 0
        lengths = [each.share(rank) for each in self.buckets]
        # A span in memory holds one tensor of state, in the dtype of the update.
        sizes = [
            each.master_size if state != "parameters" else each.itemsize for each in self.buckets
        ]
        kept = [1] * len(lengths)
        if state == "optimizer":
            kept = [
                len(each.group.moments) + self._has_master(each)
                for each in self.buckets
                if each.group
            ]
        records = sum(-(-n // SPAN) * each for n, each in zip(lengths, kept, strict=True))
        longest = max(
            (min(n, SPAN) * size for n, size in zip(lengths, sizes, strict=True)), default=0
        )
        # Never more buffers than there are spans.
        return min(3 * max([1, *kept]) + 1, records) * longest

    @property
    def unlaid_bytes(self) -> int:
        """Bytes of frozen parameters outside of buckets, which are whole on every rank."""
        # Frozen parameters are in buckets only if they are gathered like the others.
        laid = self.row.is_sharded("parameters")
        return sum(
            each.nbytes
            for each in self.record.parameters
            if each.group < 0 and not (laid and each.is_float)
        )

    def unit_bytes(self) -> list[int]:
        """Return the bytes of gathered parameters, by unit."""
        by_unit = [0] * len(self.record.units)
        for bucket in (*self.buckets, *self.frozen):
            by_unit[bucket.unit] += bucket.nbytes
        return by_unit


def lay_out(
    record: StepRecord,
    row: Placement,
    ranks: int,
    *,
    bucket_mb: float = 25.0,
    apart: bool = False,
) -> StateLayout:
    """Return the buckets of `record` under `row`, over `ranks` ranks."""
    # Units are gathered one by one, so a bucket must not contain parameters of two units.
    by_unit = row.is_sharded("parameters")
    trained = [each for each in record.parameters if each.group >= 0]
    frozen = [each for each in record.parameters if each.group < 0 and each.is_float]
    # If nothing is cut, unknown optimizers get whole tensors, as they would without the engine.
    cuts_nothing = (ranks == 1 or not row.is_sharded("optimizer")) and not any(
        tier.kind == "nvme" for tier in row.tiers
    )
    capacity = int(bucket_mb * 2**20)
    return StateLayout(
        record,
        row,
        ranks,
        _laid(record, trained, ranks, capacity, by_unit=by_unit, as_given=cuts_nothing),
        _laid(record, frozen, ranks, capacity, by_unit=True, as_given=False) if by_unit else (),
        apart,
    )


def _laid(
    record: StepRecord,
    parameters: Sequence[ParameterRecord],
    ranks: int,
    capacity: int,
    *,
    by_unit: bool,
    as_given: bool,
) -> tuple[LaidBucket, ...]:
    """Return the buckets of `parameters`.

    `as_given`: optimizers that are not torch's get whole tensors.
    """
    specs = []
    for each in parameters:
        group = record.groups[each.group] if each.group >= 0 else None
        whole = group is not None and (not group.elementwise or (as_given and not group.known))
        # A bucket never mixes units (if gathered by unit), parameter groups or dtypes.
        owner = (group.number, group.index) if group is not None else (-1, None)
        key = (each.unit if by_unit else 0, *owner, each.dtype)
        specs.append(
            Spec(name=each.name, numel=each.numel, itemsize=each.itemsize, key=key, whole=whole)
        )
    buckets = []
    for layout in bucket_layout.lay_out(specs, ranks=ranks, capacity=capacity):
        first = parameters[layout.slots[0].parameter]
        group = record.groups[first.group] if first.group >= 0 else None
        buckets.append(LaidBucket(layout, first.itemsize, first.dtype, first.unit, group))
    return tuple(buckets)
