"""Predicts how long a step of an observed script takes with a given placement.

The operations of the record become the work of units in the order of forward. Operations before the
first unit and after the last one count as two more units. Pipeline stages are split as the engine
splits them. Tensor parallelism divides matrix products, and the traffic of tensors that are larger
than a unit's output. The output itself is summed twice in forward and twice in backward, as in
Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from shardwise.tools.plan.choice import Choice, Estimate
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import all_reduce_seconds
from shardwise.tools.plan.operations import Work, busy
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.record import Operation, StepRecord
from shardwise.tools.plan.stage_records import part_of, stage_layers
from shardwise.tools.plan.stages import Bytes, UnitWork, step_times

CALIBRATED, CATALOGUE, ASSUMED = 0.55, 0.20, 0.40
"""The error band of an estimate. CALIBRATED is for a measured machine, rounded up from 52.9 %, the
largest error of a step time in docs/plan_accuracy.md, so that table is no independent check of it.
CATALOGUE is for a device whose efficiency others measured, ASSUMED for an assumed efficiency."""

BEFORE, AFTER = -2, -1
"""The numbers of the operations outside of units: before the first unit, and after it."""

PEAKS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def step_estimate(record: StepRecord, choice: Choice, cluster: Cluster) -> Estimate:
    """Return the time of one step of `choice`.

    `record` is one micro-batch of the choice's size and activations. Raises ConfigError if the
    catalogue lacks a number for it.
    """
    run = parallelism_of(choice)
    parts = [record]
    if run.pipeline > 1:
        rows = stage_layers(record, run.pipeline * run.stages_per_rank)
        parts = [part_of(record, layers) for layers in rows]
    # The boundary carries the largest output of any unit, split among the tensor ranks that send
    # it.
    stages = [unit_works(part, run, cluster) for part in parts]
    boundary = max(_outputs(record).values(), default=0) / run.tensor
    times = step_times(stages, boundary, run, cluster, bytes_of(record, choice.bucket_mb))
    # Waits are part of each rank's time, so all ranks take equally long up to rounding.
    slowest = max(times, key=lambda each: sum(each.by_kind.values()))
    band = ASSUMED if cluster.device.is_assumed else CATALOGUE
    return Estimate(
        seconds=sum(slowest.by_kind.values()),
        error=CALIBRATED if cluster.device.calibrated else band,
        parts={kind: seconds for kind, seconds in slowest.by_kind.items() if seconds > 0},
        per_rank=tuple(each.by_kind for each in times),
    )


def parallelism_of(choice: Choice) -> Parallelism:
    """Return the axes of a choice, in the engine's order."""
    return Parallelism(
        data=choice.data,
        tensor=choice.tensor,
        pipeline=choice.pipeline,
        schedule=choice.schedule,
        stages_per_rank=choice.stages_per_rank,
        micro_batch=choice.micro_batch,
        micros=choice.micro_batches,
        placement=choice.row,
    )


def bytes_of(record: StepRecord, bucket_mb: float) -> Bytes:
    """Return the bytes per element, from the parameters of a record.

    16-bit gradients are reduced in fp32, and have fp32 masters. An update reads the gradient twice
    (for its norm too), clears it, and reads and writes each state. A 16-bit parameter is written in
    addition to its master.
    """
    trained = [each for each in record.parameters if each.group >= 0]
    elements = sum(each.numel for each in trained) or 1
    # The mean over all parameters, which may have several dtypes.
    stored = sum(each.nbytes for each in trained) / elements
    master = max(4.0, stored)
    moments = sum(each.numel * len(record.groups[each.group].moments) for each in trained)
    states = master * (1 + moments / elements)
    written = stored if stored < master else 0.0
    return Bytes(
        parameter=stored,
        gradient=master,
        update=3 * master + 2 * states + written,
        on_disk=2 * states,
        bucket=bucket_mb * 2**20,
    )


def unit_works(record: StepRecord, run: Parallelism, cluster: Cluster) -> list[UnitWork]:
    """Return the work of each unit for one micro-batch on one device, in the order of forward."""
    placed = _placed(record)
    # Units in the order of forward, then units that only backward uses, and unused ones.
    used = [use.unit for use in record.uses if use.phase == "forward"]
    used += [unit for unit, _ in placed] + [each.unit for each in record.parameters]
    order = [BEFORE, *dict.fromkeys(unit for unit in used if unit >= 0), AFTER]
    outputs = _outputs(record)
    # Elements, not bytes: `Bytes` has the sizes by purpose.
    held, trained = _parameters(record)
    group = run.tensor_group(cluster)
    # The record of a tensor-parallel part is already split.
    parts = run.tensor // record.tensor
    works = []
    for unit in order:
        split = unit >= 0 and run.tensor > 1
        output = outputs.get(unit, 0)
        # Two all-reduces per pass: after attention and after the feed-forward of a layer.
        shared = 2 * all_reduce_seconds(output, group) if split else 0.0
        forward, backward = (
            busy(_divided(placed[unit, phase], parts if split else 1, output), cluster.device)
            for phase in ("forward", "backward")
        )
        part = parts if split else 1
        works.append(
            UnitWork(
                forward,
                backward,
                held[unit] / part,
                shared,
                shared,
                trained=trained[unit] / part,
            )
        )
    return works


def _placed(record: StepRecord) -> dict[tuple[int, str], list[Operation]]:
    """Return the operations by unit and phase. Those outside of units are BEFORE or AFTER."""
    inside = [number for number, each in enumerate(record.operations) if each.unit >= 0]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    placed: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for number, each in enumerate(record.operations):
        unit = each.unit
        if unit < 0:
            unit = BEFORE if number < first or number > last else AFTER
        # Operations between units have no unit. They count as AFTER, except before the first unit
        # and after the last.
        placed[unit, each.phase].append(each)
    return placed


def _outputs(record: StepRecord) -> dict[int, int]:
    """Return the bytes of each unit's output, taken as the last tensor that its forward made."""
    outputs: dict[int, int] = {}
    for each in record.tensors:
        if each.unit >= 0 and 0 <= each.born < record.backward:
            # In order of birth, so the last tensor of the unit's forward remains.
            outputs[each.unit] = each.nbytes
    return outputs


def _parameters(record: StepRecord) -> tuple[dict[int, float], dict[int, float]]:
    """Return the elements of each unit's parameters: all of them, and those that are trained.

    A parameter outside of units whose gradient is complete after all units belongs to the start of
    forward (an embedding).
    """
    inside = [n for n, each in enumerate(record.operations) if each.unit >= 0]
    last = inside[-1] if inside else -1
    held: dict[int, float] = defaultdict(float)
    trained: dict[int, float] = defaultdict(float)
    for each in record.parameters:
        unit = each.unit
        if unit < 0:
            unit = BEFORE if each.arrived > last else AFTER
        held[unit] += each.numel
        trained[unit] += each.numel if each.group >= 0 else 0
    return held, trained


def _divided(operations: Iterable[Operation], tensor: int, output: int) -> list[Work]:
    """Return the work of operations on one of `tensor` devices. Views take no time."""
    works = []
    for each in operations:
        if not each.flops and not each.bytes:
            continue
        # Every tensor rank has a unit's output whole (norms, residuals). Larger tensors are split.
        wide = max(map(math.prod, each.shapes), default=0) * ITEM.get(each.dtype, 4) > output
        part = tensor if each.flops or wide else 1
        works.append(Work(each.flops / part, each.bytes / part, peak_of(each.dtype)))
    return works


ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def peak_of(dtype: str) -> str:
    """Return the catalogue's name of the peak for a torch dtype, or "fp32" if it has none."""
    return "fp8" if dtype.startswith("float8") else PEAKS.get(dtype, "fp32")
