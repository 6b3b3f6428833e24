"""Predicts a rank's memory use over a step.

For each operation of the record, it adds up the memory in use on the device:

    states      parameters, gradients, optimizer state, frozen parameters, module buffers
    gathered    sharded parameters of the running unit, the next unit, and the rest of the model
    buckets     sharded gradients that are being reduced, and tokens that ranks exchange (--context)
    tensors     results of operations (saved for backward, or temporary) and the batch

The peak is the largest sum. After the backward pass, the update allocates temporaries. A pipeline
rank also holds the saved tensors of micro-batches whose backward pass is pending ("in flight").
Their number follows from the engine's own schedule table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.comm.shared_buffers import POOLED
from shardwise.layout.placement import STATES
from shardwise.parallel.pipeline import schedule
from shardwise.states.storage.storage import SPAN
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.layout import FP32, NARROW, StateLayout, lay_out
from shardwise.tools.plan.record import ParameterRecord, StepRecord, TensorLife
from shardwise.tools.plan.stage_records import part_of, stage_layers

IN_FLIGHT = 2
"""Number of gradient buffers that are reduced at once (states/gradients/reduction_queue)."""

ROUNDING = 512
"""CUDA's allocator rounds each allocation up to a multiple of this many bytes."""

UPDATE_TEMPORARIES = 2
"""Number of bucket-sized temporaries that an update without a fused kernel holds at once. For Adam
these are the denominator and the quotient."""

KINDS = (
    *STATES, "frozen", "buffers", "gathered", "buckets", "disk buffers", "in flight", "saved",
    "temporary", "batch",
)  # fmt: skip
"""The kinds of memory, in the order of the plots."""


@dataclass(frozen=True)
class Hardware:
    """The properties of the devices that affect memory.

    Args:
        apart: True if the device's memory is separate from the host's.
        shares: True if the ranks on a host share memory. Each rank then reads the other ranks'
            shards in place, so only its own shard counts toward its memory.
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
    """The predicted memory of one rank, as total bytes of its tensors.

    On an accelerator, this is the memory that its allocator hands out. On a CPU, the process uses
    more memory: Python, libraries, kernel workspaces and the C library's free blocks are not
    included.

    Attributes:
        states: Bytes of each state (see STATES), on any tier.
        tiers: Bytes of states on each tier.
        curve: Bytes on the device at each operation, shape (operations + 1,). The last entry is
            the update.
        parts: The same as `curve` for each of KINDS.
        peak: Maximum of `curve`.
        at: Index of the peak in `curve`.
        where: Description of the operation at the peak.
        held: Tensors that are alive at the peak, largest first.
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
    """Index of the first operation of the backward pass."""
    second_copies: tuple[int, int] = (0, 0)
    """Bytes that `--survive` adds: held on any tier, and sent in each step. They are not part of
    the other figures."""

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak."""
        return {kind: int(values[self.at]) for kind, values in self.parts.items()}


Parts = dict[str, NDArray[np.int64]]
"""For each of KINDS, the bytes at each operation and in the update, shape (operations + 1,)."""


@dataclass(frozen=True)
class InFlight:
    """Bytes that a pipeline rank holds for other micro-batches.

    `forward` applies while a forward pass runs, and `backward` applies while a backward pass runs.
    """

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
    """Return the predicted memory of `rank` over a step with `choice`.

    `record` is a micro-batch that was observed with the size and recomputation of `choice`. It
    covers the full model, or one stage of a pipeline rank. For a stage, `parameters` are the
    parameters of all stages on that rank, and `in_flight` is the memory of other micro-batches.
    """
    layout = lay_out(
        record if parameters is None else replace(record, parameters=parameters),
        choice.row,
        choice.data,
        bucket_mb=choice.bucket_mb,
        apart=hardware.apart,
        expert=choice.expert,
        tensor=choice.tensor,
    )
    count = len(record.operations)
    parts = {kind: np.zeros(count + 1, dtype=np.int64) for kind in KINDS}
    states = layout.bytes_by_state(rank)
    # Gradients accumulated over several micro-batches are stored in fp32, even for 16-bit
    # parameters. Gradients on disk are not adjusted here: `bucket_bytes` already counts them in
    # fp32.
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
    if hardware.shares:
        parts["buckets"] += _published(record)
    _add_tensors(parts, record, hardware)
    # Index `count` is the update. The batch is still alive then, because the script's loop variable
    # refers to it.
    parts["batch"][count] = parts["batch"][count - 1] if count else 0
    parts["temporary"][count] = _update_temporaries(layout, rank)
    # Shape (operations + 1,). The last entry is the update.
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
        layout.second_copies(rank),
    )


def _add_states(
    parts: Parts, states: Mapping[str, int], staging: int, choice: Choice, hardware: Hardware
) -> dict[str, int]:
    """Add the device's states and the staging buffers to `parts`. Return the bytes per tier."""
    tiers: dict[str, int] = defaultdict(int)
    for state, nbytes in states.items():
        tier = choice.row.tier(state).kind
        # If the device is a CPU, the host's memory is its own, so offloading to it saves nothing.
        tier = "device" if tier == "cpu" and not hardware.apart else tier
        tiers[tier] += nbytes
        if tier == "device":
            parts[state] += nbytes
    # Staging buffers are in host memory. Only on a CPU is that the device's memory.
    if hardware.apart and staging:
        tiers["cpu"] += staging
    else:
        parts["disk buffers"] += staging
    return dict(tiers)


def _add_tensors(parts: Parts, record: StepRecord, hardware: Hardware) -> None:
    """Add the size of each tensor of the step to `parts`, over its lifetime."""
    for life in record.tensors:
        kind = _kind(life)
        # On an accelerator, round up as CUDA's allocator does. On a CPU, the overhead of the C
        # library is not included.
        nbytes = -(-life.nbytes // ROUNDING) * ROUNDING if hardware.apart else life.nbytes
        # The interval includes `died`, because an operation's inputs are alive while it runs.
        parts[kind][max(life.born, 0) : life.died + 1] += nbytes
        # A variable of the script refers to the tensor until the next step reassigns it. The old
        # tensor is therefore still alive in the next step, until the new one is created.
        if life.kept:
            parts[kind][: life.born] += nbytes


def _kind(life: TensorLife) -> str:
    if life.source == "batch":
        return "batch"
    return "saved" if life.saved else "temporary"


def _borrowed(layout: StateLayout, hardware: Hardware) -> int:
    """Return the bytes of the buffers that collect and send sharded gradients.

    Each buffer has the size of the largest bucket with its dtype.
    """
    if not layout.row.is_sharded("gradients"):
        return 0
    # With shared memory, a rank sums its own shard in place, so that part of the buffer is never
    # touched and uses no memory. A shard on disk is summed in the buffer instead.
    passes_by = hardware.shares and layout.row.tier("gradients").kind != "nvme"
    sent = layout.ranks - 1 if passes_by else layout.ranks
    longest: dict[str, int] = {}
    counts: dict[str, int] = defaultdict(int)
    for bucket in layout.buckets:
        longest[bucket.dtype] = max(longest.get(bucket.dtype, 0), bucket.nbytes)
        counts[bucket.dtype] += 1
    # One more buffer than those in flight, for the bucket that the backward pass is filling.
    whole = sum(nbytes * min(counts[kind], IN_FLIGHT + 1) for kind, nbytes in longest.items())
    return whole * sent // layout.ranks


def _published(record: StepRecord) -> NDArray[np.int64]:
    """Return the bytes of the copies of exchanged tokens in shared memory at each operation.

    The pool keeps two copies, because a rank may start the next exchange before the others have
    read its last one. A copy that is too large for the pool exists only while its unit runs.
    """
    pooled = max((each.nbytes for each in record.exchanged if each.nbytes <= POOLED), default=0)
    large: dict[tuple[int, str], int] = defaultdict(int)
    for each in record.exchanged:
        if each.nbytes > POOLED:
            place = each.unit, each.phase
            large[place] = max(large[place], each.nbytes)
    alone = [large.get((each.unit, each.phase), 0) for each in record.operations]
    return 2 * pooled + np.array([*alone, 0], dtype=np.int64)


def _gathered(layout: StateLayout, record: StepRecord, hardware: Hardware) -> NDArray[np.int64]:
    """Return the bytes of gathered parameters at each operation.

    These are the parameters of the running unit, of the next unit (which is being gathered), and of
    the units that hold the rest of a model. The rest stays gathered until the end of the backward
    pass.
    """
    gathered = np.zeros(len(record.operations) + 1, dtype=np.int64)
    # With shared memory, a rank reads the other ranks' shards in place, without a gathered copy.
    # 4-bit weights are always expanded into a copy.
    sharded = layout.row.is_sharded("parameters") and not hardware.shares and layout.ranks > 1
    if not sharded and not any(bucket.quantised for bucket in layout.frozen):
        return gathered
    sizes, packed = layout.unit_bytes(), layout.packed_bytes()
    resting = {n for n, name in enumerate(record.units) if name.startswith("the rest of")}
    always = sum(sizes[number] for number in resting)
    order = [use.unit for use in record.uses if use.phase == "forward" and use.unit not in resting]
    after = dict(pairwise(order))
    # The backward pass runs the units in reverse order, so its next unit is the previous one of the
    # forward pass.
    before = {second: first for first, second in after.items()}
    for number, operation in enumerate(record.operations):
        unit = operation.unit
        coming = (after if operation.phase == "forward" else before).get(unit, -1)
        if not layout.row.is_sharded("parameters"):
            coming = -1  # 4-bit weights that no rank shares are expanded only when needed
        here = sizes[unit] if unit >= 0 and unit not in resting else 0
        # 4-bit weights are expanded at the start of their unit, so both forms are in memory.
        gathered[number] = always + here + (sizes[coming] + packed[coming] if coming >= 0 else 0)
    return gathered


def _update_temporaries(layout: StateLayout, rank: int) -> int:
    """Return the peak bytes of the temporaries in a bucket's update.

    These are an fp32 copy of 16-bit gradients, and the intermediate results of an update without a
    fused kernel. For states on disk, the initial state of a span is another temporary, because it
    is created in memory before it is written. For 8-bit state, only one span at a time is expanded
    to full precision.
    """
    on_disk = layout.row.tier("optimizer").kind == "nvme"
    most = 0
    for bucket in layout.buckets:
        assert bucket.group is not None
        sharded = layout.row.is_sharded("optimizer")
        numel = bucket.share(rank) if sharded else bucket.layout.numel
        # The update of a 16-bit bucket works on an fp32 copy of its gradient.
        copies = bucket.dtype in NARROW
        # A fused kernel computes in registers. Separate operations allocate tensors of the bucket's
        # size.
        loops = 0 if bucket.group.fused else UPDATE_TEMPORARIES
        most = max(most, numel * bucket.master_size * (copies + loops))
        if on_disk or bucket.group.quantised:
            most = max(most, min(numel, SPAN) * bucket.master_size * len(bucket.group.moments))
    return most


def _where(record: StepRecord, at: int) -> str:
    """Return a description of the operation with index `at`, or of the update."""
    if at >= len(record.operations):
        return "the update, in engine.step"
    operation = record.operations[at]
    unit = f" of {record.units[operation.unit]}" if operation.unit >= 0 else ""
    line = f" ({operation.line})" if operation.line else ""
    return f"{operation.name} in {operation.phase}{unit}{line}"


def _held(record: StepRecord, at: int) -> tuple[Held, ...]:
    """Return the tensors that are alive at the operation with index `at`, largest first."""
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
    """The numbers of micro-batches that wait for their backward pass, per stage of a rank.

    `forward` holds the numbers at the largest total while a certain stage runs a forward pass.
    `backward` holds the numbers at the largest total while that stage runs a backward pass.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def predict_pipeline(record: StepRecord, choice: Choice, hardware: Hardware) -> MemoryPlan:
    """Return the predicted memory of the pipeline rank that needs the most memory.

    `record` is one micro-batch of the full model.
    """
    stages = choice.pipeline * choice.stages_per_rank
    rows = stage_layers(record, stages)
    # Early ranks hold more micro-batches, and the first and last ranks have larger layers. So the
    # rank with the highest peak is only known after predicting all of them.
    plans = (_rank(record, choice, hardware, rows, rank) for rank in range(choice.pipeline))
    return max(plans, key=lambda plan: plan.peak)


def _rank(
    record: StepRecord, choice: Choice, hardware: Hardware, rows: Sequence[range], rank: int
) -> MemoryPlan:
    """Return the predicted memory of pipeline rank `rank` while its most demanding stage runs."""
    # Stage s runs on rank s % pipeline, as in the engine.
    own = list(range(rank, len(rows), choice.pipeline))
    parts = [part_of(record, rows[stage]) for stage in own]
    # The rank always holds the states of all its stages, even though only one stage is running.
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
    """Return the bytes that a micro-batch's forward pass saves for its backward pass."""
    return sum(each.nbytes for each in part.tensors if each.saved)


@lru_cache(maxsize=4096)
def most_waiting(name: str, ranks: int, stages: int, micros: int, rank: int, place: int) -> Waiting:
    """Return the largest numbers of pending micro-batches on `rank` while its stage `place` runs.

    The micro-batch that is running is not included.
    """
    waiting = [0] * (stages // ranks)
    # Forward and backward passes are tracked separately, because different numbers of micro-batches
    # are pending during them.
    most = {"F": (0,) * len(waiting), "B": (0,) * len(waiting)}
    for action in schedule.actions_of(name, ranks, stages, micros, rank):
        here, forward = action.stage // ranks, action.kind == "F"
        if not forward:
            waiting[here] -= 1
        if here == place:
            kind = "F" if forward else "B"
            most[kind] = max(most[kind], tuple(waiting), key=sum)
        # Zero-bubble schedules split a backward pass into I and W. Saved tensors are needed until
        # W is complete, so a micro-batch is pending again after I.
        if forward or action.kind == "I":
            waiting[here] += 1
    return Waiting(most["F"], most["B"])
