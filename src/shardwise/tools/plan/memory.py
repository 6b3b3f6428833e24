"""Predicts the memory of a rank through a step: states, gathered units, buckets, saved tensors.

The walk goes over the operations of the record. At each of them a device holds

    states      parameters, gradients, optimizer state as the layout defines; frozen ones, buffers
    gathered    sharded parameters of the running unit, of the next one, and of the rest
    buckets     gradients in flight, if they are sharded
    tensors     results of operations: saved for backward, temporary, the batch

and the peak is the largest sum. After backward the update makes temporaries. A rank of a pipeline
also holds the saved tensors of each micro-batch whose backward is pending (`in flight`). The
schedule's table, which the engine runs, gives their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.placement import STATES
from shardwise.parallel.pipeline import schedule
from shardwise.states.storage.storage import SPAN
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.layout import FP32, NARROW, StateLayout, lay_out
from shardwise.tools.plan.record import ParameterRecord, StepRecord, TensorLife
from shardwise.tools.plan.stage_records import part_of, stage_layers

IN_FLIGHT = 2
"""Gradient buffers that are in a collective at once (states/gradients/reduction_queue)."""

ROUNDING = 512
"""CUDA's allocator rounds every tensor up to a multiple of this many bytes."""

UPDATE_TEMPORARIES = 2
"""Tensors of a bucket's length that an update without a fused kernel holds at once (Adam's
denominator, and the quotient)."""

KINDS = (
    *STATES, "frozen", "buffers", "gathered", "buckets", "disk buffers", "in flight", "saved",
    "temporary", "batch",
)  # fmt: skip
"""The uses of memory, in the order of the plots."""


@dataclass(frozen=True)
class Hardware:
    """The properties of a device that matter for memory.

    Args:
        apart: the device's memory is not the host's.
        shares: ranks of a host share memory. A rank then reads sharded parameters in place, so
            only its own shard counts.
    """

    apart: bool = True
    shares: bool = False


@dataclass(frozen=True)
class Held:
    """A tensor that is alive at the peak."""

    nbytes: int
    source: str
    line: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of tensors on one rank: by state and tier, through the step, and at the peak.

    On an accelerator these are the bytes that its allocator gives out. On a CPU the process takes
    more: Python, libraries, workspaces of kernels and free blocks of the C library are not counted.

    `curve` is the number of bytes on the device by operation, shape (operations + 1,), the update
    last. `parts` is the same by kind. `peak` is the maximum of `curve`, `at` its index, and `where`
    the name of that operation.
    """

    states: dict[str, int]
    tiers: dict[str, int]
    curve: NDArray[np.int64]
    parts: dict[str, NDArray[np.int64]]
    peak: int
    at: int
    where: str
    held: tuple[Held, ...]
    backward: int
    """The index of the first operation of backward."""

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by kind at the peak."""
        return {kind: int(values[self.at]) for kind, values in self.parts.items()}


Parts = dict[str, NDArray[np.int64]]
"""Bytes at each operation and in the update, by kind: shape (operations + 1,)."""


@dataclass(frozen=True)
class InFlight:
    """Bytes of other micro-batches on a pipeline's rank, in a forward and in a backward."""

    forward: int = 0
    backward: int = 0


def predict(
    record: StepRecord,
    choice: Choice,
    hardware: Hardware,
    *,
    rank: int = 0,
    parameters: tuple[ParameterRecord, ...] | None = None,
    in_flight: InFlight = InFlight(),
) -> MemoryPlan:
    """Return the memory of `rank` in a step of `choice`.

    `record` is one micro-batch of the choice's size and activations: of the whole model, or of one
    stage of a pipeline rank. Then `parameters` are the parameters of all its stages.
    """
    layout = lay_out(
        record if parameters is None else replace(record, parameters=parameters),
        choice.row,
        choice.data,
        bucket_mb=choice.bucket_mb,
        apart=hardware.apart,
    )
    count = len(record.operations)
    parts = {kind: np.zeros(count + 1, dtype=np.int64) for kind in KINDS}
    states = layout.bytes_by_state(rank)
    # Sums over several micro-batches are kept in fp32, also for 16-bit gradients. On a disk they
    # are in fp32 in any case.
    if choice.micro_batches > 1 and layout.row.tier("gradients").kind != "nvme":
        states["gradients"] += sum(
            layout.bucket_bytes(bucket, rank)[1] * (FP32 - bucket.itemsize) // bucket.itemsize
            for bucket in layout.buckets
            if bucket.dtype in NARROW
        )
    tiers = _add_states(parts, states, layout.staging_bytes(rank), choice, hardware)
    parts["frozen"] += layout.unlaid_bytes
    parts["buffers"] += record.buffer_bytes
    parts["gathered"] += _gathered(layout, record, hardware)
    parts["in flight"][: record.backward] = in_flight.forward
    parts["in flight"][record.backward : count] = in_flight.backward
    parts["buckets"] += _borrowed(layout, hardware)
    _add_tensors(parts, record, hardware)
    # Index `count` is the update. The batch is still alive, because the loop variable refers to it.
    parts["batch"][count] = parts["batch"][count - 1] if count else 0
    parts["temporary"][count] = _update_temporaries(layout, rank)
    # Shape (operations + 1,): the last entry is the update.
    curve = np.sum(list(parts.values()), axis=0)
    at = int(curve.argmax())
    return MemoryPlan(
        states,
        tiers,
        curve,
        parts,
        int(curve[at]),
        at,
        _where(record, at),
        _held(record, at),
        record.backward,
    )


def _add_states(
    parts: Parts, states: Mapping[str, int], staging: int, choice: Choice, hardware: Hardware
) -> dict[str, int]:
    """Add the states on the device and the buffers of disks. Return bytes by tier."""
    tiers: dict[str, int] = defaultdict(int)
    for state, nbytes in states.items():
        tier = choice.row.tier(state).kind
        # On a CPU the host's memory is the device's own, so offloading to it saves nothing.
        tier = "device" if tier == "cpu" and not hardware.apart else tier
        tiers[tier] += nbytes
        if tier == "device":
            parts[state] += nbytes
    # Staging buffers are in the host's memory, which only on a CPU is the device's.
    if hardware.apart and staging:
        tiers["cpu"] += staging
    else:
        parts["disk buffers"] += staging
    return dict(tiers)


def _add_tensors(parts: Parts, record: StepRecord, hardware: Hardware) -> None:
    """Add the tensors of the step, each over its lifetime."""
    for life in record.tensors:
        kind = _kind(life)
        # Rounded up, as CUDA's allocator does. The C library's overhead is not counted.
        nbytes = -(-life.nbytes // ROUNDING) * ROUNDING if hardware.apart else life.nbytes
        # Including `died`: its inputs are alive while an operation runs.
        parts[kind][max(life.born, 0) : life.died + 1] += nbytes
        # The script's variable refers to the tensor until the next step assigns it, so in the next
        # step both are alive up to that operation.
        if life.kept:
            parts[kind][: life.born] += nbytes


def _kind(life: TensorLife) -> str:
    if life.source == "batch":
        return "batch"
    return "saved" if life.saved else "temporary"


def _borrowed(layout: StateLayout, hardware: Hardware) -> int:
    """Return the bytes of the buffers that collect and send sharded gradients.

    Each buffer is as long as the longest bucket of its dtype.
    """
    if not layout.row.is_sharded("gradients"):
        return 0
    # With shared memory a rank sums its own shard in place, so those pages of the buffer are never
    # touched. A shard on a disk is summed in the buffer.
    passes_by = hardware.shares and layout.row.tier("gradients").kind != "nvme"
    sent = layout.ranks - 1 if passes_by else layout.ranks
    longest: dict[str, int] = {}
    counts: dict[str, int] = defaultdict(int)
    for bucket in layout.buckets:
        longest[bucket.dtype] = max(longest.get(bucket.dtype, 0), bucket.nbytes)
        counts[bucket.dtype] += 1
    # One more than are in flight: the bucket that backward is filling.
    whole = sum(nbytes * min(counts[kind], IN_FLIGHT + 1) for kind, nbytes in longest.items())
    return whole * sent // layout.ranks


def _gathered(layout: StateLayout, record: StepRecord, hardware: Hardware) -> NDArray[np.int64]:
    """Return the bytes of gathered parameters, by operation.

    These are the running unit, the next one, which is being gathered, and the rest of the model,
    which stays gathered from forward to the end of backward.
    """
    gathered = np.zeros(len(record.operations) + 1, dtype=np.int64)
    # With shared memory a rank reads the shards of the others in place, without a gathered copy.
    if not layout.row.is_sharded("parameters") or hardware.shares or layout.ranks == 1:
        return gathered
    sizes = layout.unit_bytes()
    resting = {n for n, name in enumerate(record.units) if name.startswith("the rest of")}
    always = sum(sizes[number] for number in resting)
    order = [use.unit for use in record.uses if use.phase == "forward" and use.unit not in resting]
    after = dict(pairwise(order))
    # Backward runs the units in reverse, so "next" is the one before.
    before = {second: first for first, second in after.items()}
    for number, operation in enumerate(record.operations):
        unit = operation.unit
        coming = (after if operation.phase == "forward" else before).get(unit, -1)
        here = sizes[unit] if unit >= 0 and unit not in resting else 0
        gathered[number] = always + here + (sizes[coming] if coming >= 0 else 0)
    return gathered


def _update_temporaries(layout: StateLayout, rank: int) -> int:
    """Return the most bytes that the update of one bucket makes.

    These are a copy of narrow gradients, temporaries of a loop without a fused kernel, and for a
    disk the initial state of a span, which is made in memory before it is written.
    """
    on_disk = layout.row.tier("optimizer").kind == "nvme"
    most = 0
    for bucket in layout.buckets:
        assert bucket.group is not None
        sharded = layout.row.is_sharded("optimizer")
        numel = bucket.share(rank) if sharded else bucket.layout.numel
        # The update of a 16-bit bucket works on an fp32 copy of its gradient.
        copies = bucket.dtype in NARROW
        # A fused kernel computes in registers. A loop of operations makes tensors of the bucket's
        # length.
        loops = 0 if bucket.group.fused else UPDATE_TEMPORARIES
        most = max(most, numel * bucket.master_size * (copies + loops))
        if on_disk:
            most = max(most, min(numel, SPAN) * bucket.master_size * len(bucket.group.moments))
    return most


def _where(record: StepRecord, at: int) -> str:
    """Return the operation at the peak, in words."""
    if at >= len(record.operations):
        return "the update, in engine.step"
    operation = record.operations[at]
    unit = f" of {record.units[operation.unit]}" if operation.unit >= 0 else ""
    line = f" ({operation.line})" if operation.line else ""
    return f"{operation.name} in {operation.phase}{unit}{line}"


def _held(record: StepRecord, at: int) -> tuple[Held, ...]:
    """Return the tensors that are alive at operation `at`, largest first."""
    alive = [life for life in record.tensors if max(life.born, 0) <= at <= life.died]
    alive.sort(key=lambda life: -life.nbytes)
    return tuple(
        Held(
            life.nbytes,
            life.source,
            life.line,
            record.units[life.unit] if life.unit >= 0 else "",
            life.shape,
            life.dtype,
            _kind(life),
        )
        for life in alive
    )


@dataclass(frozen=True)
class Waiting:
    """The number of micro-batches that wait for their backward, for each stage of a rank.

    `forward` is the most while a certain stage runs a forward, `backward` while it runs a backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def predict_pipeline(record: StepRecord, choice: Choice, hardware: Hardware) -> MemoryPlan:
    """Return the memory of the rank that needs the most.

    `record` is one micro-batch of the whole model.
    """
    stages = choice.pipeline * choice.stages_per_rank
    rows = stage_layers(record, stages)
    # Ranks differ: early ones hold more micro-batches, the first and last one larger layers.
    plans = (_rank(record, choice, hardware, rows, rank) for rank in range(choice.pipeline))
    return max(plans, key=lambda plan: plan.peak)


def _rank(
    record: StepRecord, choice: Choice, hardware: Hardware, rows: Sequence[range], rank: int
) -> MemoryPlan:
    """Return the memory of `rank` at the stage with the highest peak."""
    # Stage s runs on rank s % pipeline, as in the engine.
    own = list(range(rank, len(rows), choice.pipeline))
    parts = [part_of(record, rows[stage]) for stage in own]
    # Whichever stage runs, the rank holds the states of all its stages.
    held = tuple(p for part in parts for p in part.parameters)
    saved = [saved_bytes(part) for part in parts]
    plans = []
    for place, part in enumerate(parts):
        waiting = most_waiting(
            choice.schedule, choice.pipeline, len(rows), choice.micro_batches, rank, place
        )
        sums = [
            sum(count * size for count, size in zip(counts, saved, strict=True))
            for counts in (waiting.forward, waiting.backward)
        ]
        plans.append(predict(part, choice, hardware, parameters=held, in_flight=InFlight(*sums)))
    return max(plans, key=lambda plan: plan.peak)


def saved_bytes(part: StepRecord) -> int:
    """Return the bytes that forward saves for backward, for one micro-batch."""
    return sum(each.nbytes for each in part.tensors if each.saved)


@lru_cache(maxsize=4096)
def most_waiting(name: str, ranks: int, stages: int, micros: int, rank: int, place: int) -> Waiting:
    """Return the pending micro-batches on `rank` while its stage number `place` runs.

    The running micro-batch is not counted.
    """
    waiting = [0] * (stages // ranks)
    # By kind of the running action: a forward and a backward of this stage meet different numbers.
    most = {"F": (0,) * len(waiting), "B": (0,) * len(waiting)}
    for action in schedule.actions_of(name, ranks, stages, micros, rank):
        here, forward = action.stage // ranks, action.kind == "F"
        if not forward:
            waiting[here] -= 1
        if here == place:
            kind = "F" if forward else "B"
            most[kind] = max(most[kind], tuple(waiting), key=sum)
        # Zero-bubble schedules split backward into I and W: saved tensors are needed until W.
        if forward or action.kind == "I":
            waiting[here] += 1
    return Waiting(most["F"], most["B"])
