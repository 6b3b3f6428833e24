"""Predicts how long a step of an observed script takes under a choice of placement.

The operations of the record become the work of units in forward's order: those of a unit, and what
runs before the first unit and after the last one. Pipeline stages are cut as the engine cuts them.
Tensor parallelism divides matrix products, and traffic of tensors that are larger than a
unit's output; the output itself is summed twice in forward and twice in backward, as in
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
"""The error band of an estimate: on a machine that was calibrated, rounded up from the 52.9 % that
are the largest error of docs/plan_accuracy.md (step time, measured here), so that table is no
independent check of it; with the catalogue's efficiency of a device that others measured; and with
an efficiency that is assumed."""

BEFORE, AFTER = -2, -1
"""The numbers of what runs outside of units: before the first, and after it."""

PEAKS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def step_estimate(record: StepRecord, choice: Choice, cluster: Cluster) -> Estimate:
    """Return the time of one step of `choice`.

    `record` is of one micro-batch of its size, with its recomputation. Raises ConfigError if the
    catalogue lacks a number for it.
    """
    run = parallelism_of(choice)
    parts = [record]
    if run.pipeline > 1:
        rows = stage_layers(record, run.pipeline * run.stages_per_rank)
        parts = [part_of(record, layers) for layers in rows]
    stages = [unit_works(part, run, cluster) for part in parts]
    boundary = max(_outputs(record).values(), default=0) / run.tensor
    times = step_times(stages, boundary, run, cluster, bytes_of(record, choice.bucket_mb))
    slowest = max(times, key=lambda each: sum(each.by_kind.values()))
    band = ASSUMED if cluster.device.is_assumed else CATALOGUE
    return Estimate(
        seconds=sum(slowest.by_kind.values()),
        error=CALIBRATED if cluster.device.calibrated else band,
        parts={kind: seconds for kind, seconds in slowest.by_kind.items() if seconds > 0},
        per_rank=tuple(each.by_kind for each in times),
    )


def parallelism_of(choice: Choice) -> Parallelism:
    """The axes of a choice, as the engine lays them."""
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
    """Bytes of one element, from the parameters of a record: 16-bit gradients are reduced in fp32,
    and have fp32 masters. An update reads the gradient, for its norm too, clears it, and reads and
    writes each state; a 16-bit parameter is written beside its master."""
    trained = [each for each in record.parameters if each.group >= 0]
    elements = sum(each.numel for each in trained) or 1
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
        bucket=bucket_mb * 1e6,
    )


def unit_works(record: StepRecord, run: Parallelism, cluster: Cluster) -> list[UnitWork]:
    """The work of each unit for one micro-batch on one device, in forward's order."""
    placed = _placed(record)
    # Units as forward first uses them, then those that only backward or nobody uses.
    used = [use.unit for use in record.uses if use.phase == "forward"]
    used += [unit for unit, _ in placed] + [each.unit for each in record.parameters]
    order = [BEFORE, *dict.fromkeys(unit for unit in used if unit >= 0), AFTER]
    outputs = _outputs(record)
    held, trained = _parameters(record)
    group = run.tensor_group(cluster)
    # A record of a tensor-parallel part is split already: divide only what is not.
    parts = run.tensor // record.tensor
    works = []
    for unit in order:
        split = unit >= 0 and run.tensor > 1
        output = outputs.get(unit, 0)
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
    """The operations of each unit and phase; those outside of units are BEFORE or AFTER."""
    inside = [number for number, each in enumerate(record.operations) if each.unit >= 0]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    placed: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for number, each in enumerate(record.operations):
        unit = each.unit
        if unit < 0:
            unit = BEFORE if number < first or number > last else AFTER
        placed[unit, each.phase].append(each)
    return placed


def _outputs(record: StepRecord) -> dict[int, int]:
    """Bytes of what each unit's forward gives to the next: the last tensor that it made."""
    found: dict[int, int] = {}
    for each in record.tensors:
        if each.unit >= 0 and 0 <= each.born < record.backward:
            found[each.unit] = each.nbytes
    return found


def _parameters(record: StepRecord) -> tuple[dict[int, float], dict[int, float]]:
    """Elements of each unit's parameters, all and trained. Outside of units, those whose gradient
    comes last in backward are of what forward begins with."""
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
    """The work of operations on one of `tensor` devices; views take nothing."""
    works = []
    for each in operations:
        if not each.flops and not each.bytes:
            continue
        wide = max(map(math.prod, each.shapes), default=0) * ITEM.get(each.dtype, 4) > output
        part = tensor if each.flops or wide else 1
        works.append(Work(each.flops / part, each.bytes / part, peak_of(each.dtype)))
    return works


ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def peak_of(dtype: str) -> str:
    """The catalogue's name of a peak for a dtype of torch; fp32 for what no product is made of."""
    return "fp8" if dtype.startswith("float8") else PEAKS.get(dtype, "fp32")
