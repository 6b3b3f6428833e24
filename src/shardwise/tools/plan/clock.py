"""Predicts how long a step of an observed script takes with a given placement.

The recorded operations are assigned to units, in forward order. Operations before the first unit
and after the last one form two extra units. Layers are split into pipeline stages as in the engine.
Tensor parallelism divides the work of matrix products, and the memory traffic of tensors that are
larger than a unit's output. The output itself is all-reduced twice in the forward pass and twice in
the backward pass, as in Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from shardwise.states.storage import nf4_storage
from shardwise.tools.plan.choice import Choice, Estimate
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import all_reduce_seconds, all_to_all_seconds
from shardwise.tools.plan.operations import Busy, Work, busy, memory_seconds
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.record import Operation, StepRecord
from shardwise.tools.plan.stage_records import part_of, stage_layers
from shardwise.tools.plan.stages import Bytes, UnitWork, step_times

CALIBRATED, CATALOGUE, ASSUMED = 0.55, 0.20, 0.40
"""Error bands of an estimate, as fractions. CALIBRATED applies to a machine measured with
--calibrate. It is rounded up from 52.9 %, the largest step-time error in docs/plan_accuracy.md, so
that page does not check it independently. CATALOGUE applies to devices with a published measured
efficiency, and ASSUMED applies to devices with an assumed one."""

BEFORE, AFTER = -2, -1
"""Numbers of the two extra units, for operations before the first unit and after the last."""

ROUNDING_BYTES = 96
"""Bytes that torch's operations read and write to expand one element of 8-bit optimizer state to
fp32 (21) and to round it again (75), in states/storage/quantised_storage.py."""

EXPANSION_BYTES = 22
"""Bytes read and written to expand a frozen weight from 4 bits to bf16, in
states/storage/nf4_storage.py."""

PEAKS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def step_estimate(record: StepRecord, choice: Choice, cluster: Cluster) -> Estimate:
    """Return the estimated time of one step with `choice`.

    `record` is a micro-batch that was observed with the size and recomputation of `choice`. Raises
    ConfigError if the catalogue lacks a value that the estimate needs.
    """
    run = parallelism_of(choice)
    parts = [record]
    if run.pipeline > 1:
        rows = stage_layers(record, run.pipeline * run.stages_per_rank)
        parts = [part_of(record, layers) for layers in rows]
    # Between stages, the largest output of any unit is sent. Each tensor rank sends its share.
    stages = [unit_works(part, run, cluster) for part in parts]
    boundary = max(_outputs(record).values(), default=0) / run.tensor
    times = step_times(stages, boundary, run, cluster, bytes_of(record, choice.bucket_mb))
    # Each rank's time includes its waits, so the totals differ only by rounding.
    slowest = max(times, key=lambda each: sum(each.by_kind.values()))
    band = ASSUMED if cluster.device.is_assumed else CATALOGUE
    return Estimate(
        seconds=sum(slowest.by_kind.values()),
        error=CALIBRATED if cluster.device.calibrated else band,
        parts={kind: seconds for kind, seconds in slowest.by_kind.items() if seconds > 0},
        per_rank=tuple(each.by_kind for each in times),
    )


def parallelism_of(choice: Choice) -> Parallelism:
    """Return the mesh and micro-batches of a candidate as a `Parallelism`."""
    return Parallelism(
        data=choice.data,
        tensor=choice.tensor,
        pipeline=choice.pipeline,
        expert=choice.expert,
        context=choice.context,
        schedule=choice.schedule,
        stages_per_rank=choice.stages_per_rank,
        micro_batch=choice.micro_batch,
        micros=choice.micro_batches,
        placement=choice.row,
    )


def bytes_of(record: StepRecord, bucket_mb: float) -> Bytes:
    """Return the bytes moved per element, derived from the record's parameters.

    16-bit parameters have fp32 masters, and their gradients are reduced in fp32. An update reads
    the gradient twice (once for the norm), clears it, and reads and writes each state. With 16-bit
    parameters, it also writes the parameter itself. An update also expands 8-bit state and rounds
    it again.
    """
    trained = [each for each in record.parameters if each.group >= 0]
    elements = sum(each.numel for each in trained) or 1
    # Parameters may have different dtypes, so use the mean size of an element.
    stored = sum(each.nbytes for each in trained) / elements
    master = max(4.0, stored)
    moments = sum(each.numel * len(record.groups[each.group].moments) for each in trained)
    narrow = sum(
        each.numel * len(group.moments)
        for each in trained
        if (group := record.groups[each.group]).quantised
    )
    states = master * (1 + moments / elements)
    written = stored if stored < master else 0.0
    return Bytes(
        parameter=stored,
        gradient=master,
        update=3 * master + 2 * states + written + ROUNDING_BYTES * narrow / elements,
        host_update=master + 2 * states + written + ROUNDING_BYTES * narrow / elements,
        on_disk=2 * states,
        bucket=bucket_mb * 2**20,
    )


def unit_works(record: StepRecord, run: Parallelism, cluster: Cluster) -> list[UnitWork]:
    """Return the work of each unit for one micro-batch on one device, in forward order."""
    placed = _placed(record)
    # Units in forward order, then units that only the backward pass uses, then unused units.
    used = [use.unit for use in record.uses if use.phase == "forward"]
    used += [unit for unit, _ in placed] + [each.unit for each in record.parameters]
    order = [BEFORE, *dict.fromkeys(unit for unit in used if unit >= 0), AFTER]
    outputs = _outputs(record)
    # Numbers of elements, because the bytes per element depend on the purpose (see `Bytes`).
    held, trained, experts, expanded = _parameters(record, run.expert)
    exchanges = _exchanges(record, run, cluster)
    group = run.tensor_group(cluster)
    # A record made with tensor ranks already contains one rank's part only.
    parts = run.tensor // record.tensor
    works = []
    for unit in order:
        split = unit >= 0 and run.tensor > 1
        output = outputs.get(unit, 0)
        # Two all-reduces per pass and layer: after attention and after the feed-forward block.
        shared = 2 * all_reduce_seconds(output, group) if split else 0.0
        forward, backward = (
            busy(_divided(placed[unit, phase], parts if split else 1, output), cluster.device)
            for phase in ("forward", "backward")
        )
        part = parts if split else 1
        # Frozen weights in 4 bits are expanded in each pass, after the gather if there is one.
        expansion = Busy(memory=memory_seconds(expanded[unit] * EXPANSION_BYTES, cluster.device))
        forward, backward = forward + expansion, backward + expansion
        works.append(
            UnitWork(
                forward,
                backward,
                held[unit] / part,
                shared,
                shared,
                trained=trained[unit] / part,
                experts=experts[unit],
                exchange_forward=exchanges[unit, "forward"],
                exchange_backward=exchanges[unit, "backward"],
            )
        )
    return works


def _placed(record: StepRecord) -> dict[tuple[int, str], list[Operation]]:
    """Return operations by unit and phase. Operations outside units are under BEFORE or AFTER."""
    inside = [number for number, each in enumerate(record.operations) if each.unit >= 0]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    placed: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for number, each in enumerate(record.operations):
        unit = each.unit
        # Operations after the last unit belong to BEFORE, because they are the backward pass of
        # the operations before the first unit. Operations between two units count as AFTER.
        if unit < 0:
            unit = BEFORE if number < first or number > last else AFTER
        placed[unit, each.phase].append(each)
    return placed


def _outputs(record: StepRecord) -> dict[int, int]:
    """Return the size in bytes of each unit's output, the last tensor of its forward pass."""
    outputs: dict[int, int] = {}
    for each in record.tensors:
        if each.unit >= 0 and 0 <= each.born < record.backward:
            # Tensors are in order of creation, so the last one of the forward pass remains.
            outputs[each.unit] = each.nbytes
    return outputs


def _exchanges(
    record: StepRecord, run: Parallelism, cluster: Cluster
) -> dict[tuple[int, str], float]:
    """Return the seconds that each unit and phase spends on exchanges with other ranks.

    In these exchanges, layers with experts send tokens to the ranks that hold the experts, and
    attention sends parts of sequences that are split across ranks.
    """
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    # A recomputation sends the tokens again.
    again = 2 if record.activations == "recomputed" else 1
    group = run.expert_group(cluster)
    for each in record.routed:
        unit = each.unit if each.unit >= 0 else AFTER
        # Assumes that all experts get equally many tokens.
        there_and_back = 2 * all_to_all_seconds(each.nbytes, group)
        seconds[unit, "forward"] += there_and_back
        seconds[unit, "backward"] += again * there_and_back
    # The record contains the exchanges of both passes, and of recomputations.
    group = run.context_group(cluster)
    for sent in record.exchanged:
        unit = sent.unit if sent.unit >= 0 else AFTER
        seconds[unit, sent.phase] += all_to_all_seconds(sent.nbytes, group)
    return seconds


def _parameters(
    record: StepRecord, expert: int
) -> tuple[dict[int, float], dict[int, float], dict[int, float], dict[int, float]]:
    """Return four maps from units to parameter elements: all, trained, experts', and 4-bit.

    If experts are spread over `expert` ranks, only the third map includes their elements.

    A parameter outside units belongs to BEFORE (for example an embedding) if its gradient is
    complete only after the backward pass of all units, and to AFTER otherwise.
    """
    inside = [n for n, each in enumerate(record.operations) if each.unit >= 0]
    last = inside[-1] if inside else -1
    held: dict[int, float] = defaultdict(float)
    trained: dict[int, float] = defaultdict(float)
    experts: dict[int, float] = defaultdict(float)
    expanded: dict[int, float] = defaultdict(float)
    for each in record.parameters:
        unit = each.unit
        if unit < 0:
            unit = BEFORE if each.arrived > last else AFTER
        if expert > 1 and each.experts:
            experts[unit] += each.held(expert)
            continue
        # Weights in 4 bits are sent as they are stored: count them as fewer elements.
        narrow = nf4_storage.nbytes_of(each.numel, each.itemsize) / each.itemsize
        held[unit] += narrow if each.quantised else each.numel
        trained[unit] += each.numel if each.group >= 0 else 0
        expanded[unit] += each.numel if each.quantised else 0
    return held, trained, experts, expanded


def _divided(operations: Iterable[Operation], tensor: int, output: int) -> list[Work]:
    """Return the work of one of `tensor` devices. Views are omitted because they are free."""
    works = []
    for each in operations:
        if not each.flops and not each.bytes:
            continue
        # Every tensor rank holds a unit's full output (for norms and residuals). Larger tensors are
        # split between the tensor ranks.
        wide = max(map(math.prod, each.shapes), default=0) * ITEM.get(each.dtype, 4) > output
        part = tensor if each.flops or wide else 1
        flops, moved = each.flops / part, each.bytes / part
        works.append(Work(flops, moved, peak_of(each.dtype), unvectorised=each.unvectorised))
    return works


ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def peak_of(dtype: str) -> str:
    """Return the catalogue's name for the peak rate of a torch dtype (default: "fp32")."""
    return "fp8" if dtype.startswith("float8") else PEAKS.get(dtype, "fp32")
