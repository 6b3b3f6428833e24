"""Computes the step time from the work of each pipeline stage.

Both the predictor for observed scripts (clock.py) and the closed-form model of a transformer
(transformer.py) use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.tools.plan.catalogue import Device
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from shardwise.tools.plan.operations import LAUNCH, MATMUL, MEMORY, Busy, memory_seconds
from shardwise.tools.plan.overlap import UnitTimes, backward_pass, forward_pass
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.pipeline_time import pipeline_seconds

TENSOR = "tensor parallel"
EXCHANGE = "token exchanges"
GATHER, REDUCE, PUBLISH = "waits for parameters", "waits for gradients", "publishing parameters"
SEND, BUBBLE = "pipeline sends", "pipeline waits"
UPDATE, OFFLOAD = "update", "offload"

KINDS = (
    MATMUL, MEMORY, LAUNCH, TENSOR, EXCHANGE, GATHER, REDUCE, SEND, BUBBLE, UPDATE, PUBLISH, OFFLOAD
)  # fmt: skip


@dataclass(frozen=True)
class UnitWork:
    """The work of a unit on one device, for one micro-batch.

    `forward` and `backward` are the computation of its passes. `parameters` is the number of
    parameter elements on the device, and `trained` is the number of those with a gradient (default:
    all). `tensor_forward` and `tensor_backward` are the seconds spent in tensor-parallel
    collectives. `experts` is the number of expert elements on the device, which the other counts do
    not include. `exchange_forward` and `exchange_backward` are the seconds spent sending tokens to
    experts and back.
    """

    forward: Busy
    backward: Busy
    parameters: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    trained: float | None = None
    experts: float = 0.0
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0

    @property
    def gradients(self) -> float:
        """The number of parameter elements with a gradient."""
        return self.parameters if self.trained is None else self.trained


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes moved per parameter element, and the size of a bucket.

    Attributes:
        parameter: Bytes sent when parameters are gathered or published.
        gradient: Bytes sent when gradients are reduced.
        update: Bytes that an update reads and writes in memory.
        host_update: Bytes that an update on the host reads and writes: the gradient once, and the
            master and moments twice. The device computes the norm.
        on_disk: Bytes that an update reads and writes on disk if the states are offloaded there
            (by default the fp32 master and two moments, each read and written).
        bucket: Largest size of a bucket, in bytes of parameters. Each bucket is gathered and
            reduced by its own collective.
    """

    parameter: float = 2.0
    gradient: float = 4.0
    update: float = 38.0
    host_update: float = 28.0
    on_disk: float = 24.0
    bucket: float = math.inf


@dataclass(frozen=True)
class RankTime:
    """Step time on one pipeline rank, in seconds by kind. The kinds add up to the step time."""

    stage: int
    by_kind: dict[str, float]


def step_times(
    stages: Sequence[Sequence[UnitWork]],
    boundary: float,
    run: Parallelism,
    cluster: Cluster,
    size: Bytes,
) -> list[RankTime]:
    """Return the step time on each pipeline rank, by kind.

    `stages` lists the units of each stage. Stage s runs on rank s % run.pipeline. `boundary` is the
    number of bytes that a stage sends to the next one per micro-batch.
    """
    # First time the passes of each stage, then the schedule over all stages, then the reductions
    # and updates after the last pass.
    passes = [_StagePasses(units, run, cluster, size) for units in stages]
    send = 0.0
    if run.pipeline > 1:
        # If a replica fits on one host, its stages send over the host's fast link.
        link = cluster.inside if run.stages_on_hosts(cluster) else cluster.between
        send = send_seconds(boundary, link)
    # A blocking send delays both the sender and the receiver. Charge half of the sum to each pass.
    blocked = 2 * send if run.blocking_sends else 0.0
    forward = [each.forward + blocked / 2 for each in passes]
    backward = [each.backward + blocked / 2 for each in passes]
    beside = 0.0 if run.blocking_sends else send
    length = pipeline_seconds(run.schedule, run.pipeline, run.micros, forward, backward, beside)
    ranks = [passes[rank :: run.pipeline] for rank in range(run.pipeline)]
    tails = [max(each.tail for each in held) for held in ranks]
    updates = [_update(held, run, cluster, size) for held in ranks]
    # The step ends when the slowest rank has finished its update. The other ranks wait for it, and
    # that time counts as BUBBLE.
    end = max(t + sum(u.values()) for t, u in zip(tails, updates, strict=True))
    rank_times = []
    for rank, held in enumerate(ranks):
        kinds = _computed(held, run.micros)
        # Non-blocking sends overlap with computation, so they show up only as waits.
        kinds[SEND] = blocked * len(held) * run.micros
        kinds[REDUCE] += tails[rank]
        kinds |= updates[rank]
        kinds[BUBBLE] = max(0.0, length + end - sum(kinds.values()))
        rank_times.append(RankTime(rank, kinds))
    return rank_times


class _StagePasses:
    """The times of one stage in seconds: a micro-batch's forward and backward pass, and `tail`.

    `tail` is the time from the end of the last backward pass until its reductions are complete.
    """

    def __init__(
        self, units: Sequence[UnitWork], run: Parallelism, cluster: Cluster, size: Bytes
    ) -> None:
        self.units = units
        self.trained = sum(unit.gradients for unit in units)
        self.experts = sum(unit.experts for unit in units)
        hidden = cluster.device.numbers.get("overlap", 1.0)
        times = [_unit_times(unit, run, cluster, size) for unit in units]
        self.forward = forward_pass(times, hidden=hidden).computed
        bare = backward_pass(times, reduced=False, hidden=hidden).computed
        last = backward_pass(times, reduced=True, hidden=hidden, overlap=run.overlap)
        each = run.placement.is_sharded("gradients")  # reduced after every micro-batch
        self.backward = bare
        if each and run.overlap:
            # Reductions still pending after the backward pass overlap with the next forward pass.
            # They delay the next backward pass only if they take longer than that.
            self.backward = max(last.computed, last.reduced - self.forward)
        elif each:
            self.backward = last.reduced
        self.tail = last.reduced - self.backward
        # Waits are the extra time compared with the same passes without any collective.
        alone = sum(each.forward + each.backward for each in times)
        self.gather_waits = max(0.0, self.forward + bare - alone)
        self.reduce_waits = max(0.0, self.backward - bare)


def _unit_times(unit: UnitWork, run: Parallelism, cluster: Cluster, size: Bytes) -> UnitTimes:
    group, row = run.data_group(cluster), run.placement
    # As in the engine: every rank needs the full gradient unless the optimizer is sharded.
    reduce_seconds = reduce_scatter_seconds if row.is_sharded("optimizer") else all_reduce_seconds
    gather, reduction = 0.0, _by_bucket(reduce_seconds, unit.gradients, size.gradient, group, size)
    if row.is_sharded("parameters"):
        gather = _by_bucket(all_gather_seconds, unit.parameters, size.parameter, group, size)
    if unit.experts:
        copies = run.copies_group(cluster)
        reduction += _by_bucket(reduce_seconds, unit.experts, size.gradient, copies, size)
        if row.is_sharded("parameters"):
            gather += _by_bucket(all_gather_seconds, unit.experts, size.parameter, copies, size)
    return UnitTimes(
        unit.forward.seconds + unit.tensor_forward + unit.exchange_forward,
        unit.backward.seconds + unit.tensor_backward + unit.exchange_backward,
        gather,
        reduction,
    )


def _by_bucket(
    seconds: Callable[[float, Group], float],
    elements: float,
    each: float,
    group: Group,
    size: Bytes,
) -> float:
    """Return the time in seconds of a bucketed collective over `elements` elements.

    `each` is the number of bytes per element.
    """
    # Each bucket is one collective with its own latency, so the number of buckets matters as well
    # as the number of bytes.
    buckets = max(1, math.ceil(elements * size.parameter / size.bucket))
    return buckets * seconds(elements * each / buckets, group)


def _computed(held: Sequence[_StagePasses], micros: int) -> dict[str, float]:
    """Return the time of a rank's passes over all micro-batches, in seconds by kind."""
    units = [unit for each in held for unit in each.units]
    busy = sum((unit.forward + unit.backward for unit in units), Busy())
    kinds = {
        MATMUL: busy.matmul,
        MEMORY: busy.memory,
        LAUNCH: busy.launch,
        TENSOR: sum(unit.tensor_forward + unit.tensor_backward for unit in units),
        EXCHANGE: sum(unit.exchange_forward + unit.exchange_backward for unit in units),
        GATHER: sum(each.gather_waits for each in held),
        REDUCE: sum(each.reduce_waits for each in held),
    }
    return {kind: seconds * micros for kind, seconds in kinds.items()}


def _update(
    held: Sequence[_StagePasses], run: Parallelism, cluster: Cluster, size: Bytes
) -> dict[str, float]:
    """Return a rank's seconds for the update, for offloading it, and for publishing parameters."""
    trained, experts = sum(each.trained for each in held), sum(each.experts for each in held)
    row, device = run.placement, cluster.device
    # With a sharded optimizer, each rank updates only its own shard.
    own = trained + experts
    if row.is_sharded("optimizer"):
        own = trained / run.data + experts * run.expert / (run.data * run.tensor)
    seconds = {UPDATE: memory_seconds(own * size.update, device), PUBLISH: 0.0, OFFLOAD: 0.0}
    # After an update, parameters are published only if they are not sharded: sharded parameters
    # are gathered before their next use instead.
    if row.is_sharded("optimizer") and not row.is_sharded("parameters"):
        group = run.data_group(cluster)
        seconds[PUBLISH] = _by_bucket(all_gather_seconds, trained, size.parameter, group, size)
        if experts:
            copies = run.copies_group(cluster)
            published = _by_bucket(all_gather_seconds, experts, size.parameter, copies, size)
            seconds[PUBLISH] += published
    tier = row.tier("optimizer").kind
    # If the device is a CPU, host memory is its own memory, and there is no link to cross.
    if tier != "device" and device.number("host_gb_per_s"):
        # Gradients that are stored on the host are copied down during the backward pass. Any others
        # are copied during the update.
        stored = row.tier("gradients").kind != "device"
        backward = sum(each.backward for each in held) if stored else 0.0
        seconds |= _offloaded(own, tier, size, device, backward)
    return seconds


def _offloaded(
    own: float, tier: str, size: Bytes, device: Device, backward: float
) -> dict[str, float]:
    """Return the time in seconds of an update on the host, under the kind OFFLOAD.

    The update runs at the host memory's bandwidth. Updated parameters are copied up at the same
    time, and gradients are copied down during the `backward` seconds of a backward pass, or during
    the update if `backward` is 0. If states are on disk, masters and moments are read and written
    in parallel with this work, so the slowest of these determines the time.
    """
    link = needed(device, "host_gb_per_s")
    down, up = own * size.gradient / link, own * size.parameter / link
    update = own * size.host_update / needed(device, "host_memory_gb_per_s")
    seconds = max(update, up) + max(0.0, down - backward) if backward else max(update, up, down)
    if tier == "nvme":
        seconds = max(seconds, own * size.on_disk / needed(device, "disk_gb_per_s"))
    return {UPDATE: 0.0, OFFLOAD: seconds}


def needed(device: Device, name: str) -> float:
    """Return the device's value `name`. Raises ConfigError if the catalogue lacks it."""
    value = device.number(name)
    if value is None:
        raise ConfigError(
            f"The catalogue has no {name} for {device.name}, which this placement needs. Add it "
            "with its source in a file for --hardware."
        )
    return value
