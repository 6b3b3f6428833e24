"""Computes the sizes of parameters, gradients and optimizer state on each rank.

The computation uses a StepRecord and allocates no tensors. It uses the same buckets, splits and
rules as `engine.build`, so the result equals `engine.describe()` to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import bucket_layout
from shardwise.layout.bucket_layout import Bucket, Spec
from shardwise.layout.placement import STATES, Placement
from shardwise.states.storage import nf4_storage
from shardwise.states.storage.quantised_storage import BLOCK, nbytes_of
from shardwise.states.storage.storage import SPAN
from shardwise.tools.plan.record import GroupRecord, ParameterRecord, StepRecord

NARROW = ("bfloat16", "float16")
"""Dtypes that have an fp32 master."""

FP32 = 4


@dataclass(frozen=True)
class LaidBucket:
    """A bucket, and the dtype, unit and group of its parameters (`group` is None if frozen)."""

    layout: Bucket
    itemsize: int
    dtype: str
    unit: int
    group: GroupRecord | None
    holders: int = 1
    """Number of adjacent replicas over which the experts are spread. The bucket has one rank's
    experts."""

    @property
    def nbytes(self) -> int:
        """The size of the full bucket in bytes, in the dtype of its parameters."""
        return self.layout.numel * self.itemsize

    quantised: bool = False
    """True if its parameters are stored in 4 bits."""

    def stored(self, rank: int) -> int:
        """Return the bytes of a frozen bucket that `rank` stores."""
        # If only 4-bit weights are in buckets, every rank stores all of them.
        share = self.share(rank if len(self.layout.cuts) > 2 else 0)
        if self.quantised:
            return nf4_storage.nbytes_of(share, self.itemsize)
        return share * self.itemsize

    def share(self, rank: int) -> int:
        """Return the number of elements that `rank` owns."""
        first, end = self.layout.interval(rank // self.holders)
        return end - first

    @property
    def master_size(self) -> int:
        """The size in bytes of an element in the dtype of the update (fp32 for 16-bit dtypes)."""
        return FP32 if self.dtype in NARROW else self.itemsize


@dataclass(frozen=True)
class StateLayout:
    """The buckets of a record with placement `row` on `ranks` ranks.

    `frozen` are buckets of frozen parameters, which exist only if parameters are sharded or stored
    in 4 bits. `apart` is True if devices have their own memory, so that the tier `cpu` is separate
    from it. Experts are spread over groups of `expert` ranks, `tensor` of which are in each
    replica. The layout applies to the last rank of a group, which has the most experts.
    """

    record: StepRecord
    row: Placement
    ranks: int
    buckets: tuple[LaidBucket, ...]
    frozen: tuple[LaidBucket, ...]
    apart: bool
    expert: int = 1

    def bytes_by_state(self, rank: int) -> dict[str, int]:
        """Return the bytes of each state on `rank`, on all tiers, as in `engine.describe()`.

        Optimizer state is included even if the optimizers have not created it yet.
        """
        sizes = zip(*(self.bucket_bytes(bucket, rank) for bucket in self.buckets), strict=True)
        by_state = dict(zip(STATES, map(sum, sizes), strict=True))
        by_state["parameters"] += sum(each.stored(rank) for each in self.frozen)
        return by_state

    def bucket_bytes(self, bucket: LaidBucket, rank: int) -> tuple[int, int, int]:
        """Return the bytes of each state of one bucket on `rank`, in the order of STATES."""
        share = bucket.share(rank)
        updated = share if self.row.is_sharded("optimizer") else bucket.layout.numel
        held = share if self.row.is_sharded("parameters") else bucket.layout.numel
        # If gradients are sharded, a rank stores only the gradients of the shard that it updates.
        kept = updated if self.row.is_sharded("gradients") else bucket.layout.numel
        # Gradients on a disk are accumulated there, so they are stored in fp32.
        on_disk = self.row.tier("gradients").kind == "nvme" and self.row.is_sharded("gradients")
        wide = on_disk and bucket.dtype in NARROW
        assert bucket.group is not None
        mastered = self._has_master(bucket)
        size = bucket.master_size  # moments have the dtype of the update
        # The master counts as optimizer state.
        moment = nbytes_of(updated, size) if bucket.group.quantised else updated * size
        optimizer = updated * size * mastered + moment * len(bucket.group.moments)
        return held * bucket.itemsize, kept * (FP32 if wide else bucket.itemsize), optimizer

    def second_copies(self, rank: int) -> tuple[int, int]:
        """Return the bytes that `--survive` adds on `rank`: held, and sent in each step.

        If the optimizer state is sharded, each rank also holds the previous rank's optimizer state
        and reduced gradients and, if they are sharded, its parameters. It sends its own reduced
        gradients to the next rank (states/second_copies.py).
        """
        if self.ranks == 1 or not self.row.is_sharded("optimizer"):
            return 0, 0
        owner = (rank - 1) % self.ranks
        held = sent = 0
        for bucket in self.buckets:
            # The copies of the parameters and of the gradient have the dtype of the parameters.
            tensors = 1 + self.row.is_sharded("parameters")
            held += tensors * bucket.share(owner) * bucket.itemsize
            held += self.bucket_bytes(bucket, owner)[2]
            sent += bucket.share(rank) * bucket.itemsize
        if self.row.is_sharded("parameters"):
            held += sum(each.stored(owner) for each in self.frozen)
        return held, sent

    def _has_master(self, bucket: LaidBucket) -> bool:
        """Return whether the update needs a master copy of the parameters.

        It does if the parameters are 16-bit, or if either the parameters or the optimizer state are
        offloaded, but not both.
        """
        optimizer, parameters = self.row.tier("optimizer"), self.row.tier("parameters")
        away = [self.apart and tier.kind != "device" for tier in (optimizer, parameters)]
        assert bucket.group is not None
        rounded = bucket.group.rounded and bucket.dtype == "bfloat16"
        return (bucket.dtype in NARROW and not rounded) or away[0] != away[1]

    def staging_bytes(self, rank: int) -> int:
        """Return the bytes of the buffers through which `rank` accesses states on disk.

        There are three span buffers for each state tensor that is in use at the same time, and one
        spare buffer (see storage_factory).
        """
        return sum(self._staging(state, rank) for state in STATES)

    def _staging(self, state: str, rank: int) -> int:
        if self.row.tier(state).kind != "nvme":
            return 0
        lengths = [each.share(rank) for each in self.buckets]
        # A span buffer holds part of one state tensor, in the dtype of the update.
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
        # There are never more buffers than spans.
        return min(3 * max([1, *kept]) + 1, records) * longest

    @property
    def unlaid_bytes(self) -> int:
        """The size in bytes of frozen parameters outside buckets. Every rank has a full copy."""
        laid = self.row.is_sharded("parameters")
        return sum(
            each.held(self.expert) * each.itemsize
            for each in self.record.parameters
            if each.group < 0 and not each.quantised and not (laid and each.is_float)
        )

    def unit_bytes(self) -> list[int]:
        """Return the size in bytes of each unit's gathered parameters."""
        by_unit = [0] * len(self.record.units)
        trained = self.buckets if self.row.is_sharded("parameters") else ()
        for bucket in (*trained, *self.frozen):
            by_unit[bucket.unit] += bucket.nbytes
        return by_unit

    def packed_bytes(self) -> list[int]:
        """Return the size in bytes of each unit's weights in 4 bits, which gathers receive."""
        by_unit = [0] * len(self.record.units)
        for bucket in self.frozen:
            if bucket.quantised and self.ranks > 1:
                by_unit[bucket.unit] += nf4_storage.nbytes_of(bucket.layout.numel, bucket.itemsize)
        return by_unit


def lay_out(
    record: StepRecord,
    row: Placement,
    ranks: int,
    *,
    bucket_mb: float = 25.0,
    apart: bool = False,
    expert: int = 1,
    tensor: int = 1,
) -> StateLayout:
    """Return the buckets of `record` with placement `row` on `ranks` ranks.

    `bucket_mb` is the maximum size of a bucket in MiB. The other arguments are as in
    `StateLayout`.
    """
    # Units are gathered one by one, so a bucket must not contain parameters of two units.
    by_unit = row.is_sharded("parameters")
    trained = [each for each in record.parameters if each.group >= 0]
    frozen = [
        each
        for each in record.parameters
        if each.group < 0 and each.is_float and (by_unit or each.quantised)
    ]
    # If no tensor has to be split, optimizers other than torch's receive full tensors, as they
    # would without the engine.
    cuts_nothing = (ranks == 1 or not row.is_sharded("optimizer")) and not any(
        tier.kind == "nvme" for tier in row.tiers
    )
    capacity = int(bucket_mb * 2**20)
    return StateLayout(
        record,
        row,
        ranks,
        _laid(
            record,
            trained,
            ranks,
            capacity,
            (expert, tensor),
            by_unit=by_unit,
            as_given=cuts_nothing,
        ),
        _laid(
            record,
            frozen,
            ranks if by_unit else 1,
            capacity,
            (expert, tensor),
            by_unit=True,
            as_given=False,
        ),
        apart,
        expert,
    )


def _laid(
    record: StepRecord,
    parameters: Sequence[ParameterRecord],
    ranks: int,
    capacity: int,
    spread: tuple[int, int],
    *,
    by_unit: bool,
    as_given: bool,
) -> tuple[LaidBucket, ...]:
    """Return the buckets of `parameters`.

    `spread` are the ranks over which experts are spread, and those of them in each replica. If
    `as_given` is true, optimizers that are not torch's receive full tensors.
    """
    # `ranks` are replicas, so count the replicas over which experts are spread.
    expert, replicas = spread[0], max(spread[0] // spread[1], 1)
    specs = []
    for each in parameters:
        group = record.groups[each.group] if each.group >= 0 else None
        whole = group is not None and (not group.elementwise or (as_given and not group.known))
        # A bucket never mixes units (if gathered by unit), parameter groups or dtypes.
        owner = (group.number, group.index) if group is not None else (-1, None)
        key = (each.unit if by_unit else 0, *owner, each.dtype, each.quantised)
        is_split = expert > 1 and each.experts > 0
        # As in engine.build: all ranks count the same size, because they hold different experts.
        most = each.numel if each.expert >= 0 else each.held(expert)
        specs.append(
            Spec(
                name=each.name,
                numel=each.held(expert),
                itemsize=each.itemsize,
                key=key,
                whole=whole,
                room=-(-most // expert) if is_split else None,
                axis=bucket_layout.EXPERT_COPIES if is_split else bucket_layout.DATA,
            )
        )
    buckets = []
    # As in the engine, blocks of quantised state determine where all parameters start.
    grain = math.lcm(
        BLOCK if any(group.quantised for group in record.groups) else 1,
        nf4_storage.BLOCK if any(each.quantised for each in record.parameters) else 1,
    )
    for layout in bucket_layout.lay_out(
        specs, ranks=ranks, capacity=capacity, expert_copies=ranks // replicas, grain=grain
    ):
        first = parameters[layout.slots[0].parameter]
        group = record.groups[first.group] if first.group >= 0 else None
        holders = replicas if layout.axis == bucket_layout.EXPERT_COPIES else 1
        buckets.append(
            LaidBucket(
                layout, first.itemsize, first.dtype, first.unit, group, holders, first.quantised
            )
        )
    return tuple(buckets)
