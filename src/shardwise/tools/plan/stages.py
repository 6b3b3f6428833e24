"""The time of a step from the work of each pipeline stage, for scripts and for formulas."""

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
GATHER, REDUCE, PUBLISH = "waits for parameters", "waits for gradients", "publishing parameters"
SEND, BUBBLE = "pipeline sends", "pipeline waits"
UPDATE, OFFLOAD = "update", "offload"

KINDS = (
    MATMUL, MEMORY, LAUNCH, TENSOR, GATHER, REDUCE, SEND, BUBBLE, UPDATE, PUBLISH, OFFLOAD
)  # fmt: skip


@dataclass(frozen=True)
class UnitWork:
    """The work of a unit on one device, for one micro-batch.

    `forward` and `backward` are its computation, `parameters` the number of its parameter elements
    on the device. `tensor_forward` and `tensor_backward` are seconds of tensor-parallel
    collectives. `trained` is the number of elements with a gradient (default: all).
    """

    forward: Busy
    backward: Busy
    parameters: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    trained: float | None = None

    @property
    def gradients(self) -> float:
        """The number of elements with a gradient."""
        return self.parameters if self.trained is None else self.trained


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes per element, by purpose.

    `parameter` counts when it is gathered or published, `gradient` when it is reduced, `update`
    what an update reads and writes in memory, `on_disk` the same on a disk (fp32 master and two
    moments, each read and written). `bucket` is the largest size of a bucket in bytes of
    parameters. Each bucket is reduced and gathered separately.
    """

    parameter: float = 2.0
    gradient: float = 4.0
    update: float = 38.0
    on_disk: float = 24.0
    bucket: float = math.inf


@dataclass(frozen=True)
class RankTime:
    """Seconds of a step on the ranks of one stage, by kind. They add up to the step's time."""

    stage: int
    by_kind: dict[str, float]


def step_times(
    stages: Sequence[Sequence[UnitWork]],
    boundary: float,
    run: Parallelism,
    cluster: Cluster,
    size: Bytes,
) -> list[RankTime]:
    """Return the time of a step on each rank of the pipeline, by kind.

    `stages` are the units of each stage; stage s runs on rank s % run.pipeline. `boundary` is the
    number of bytes sent between two stages.
    """
    # First each stage alone, then the schedule of all stages, then what remains at the end.
    passes = [_StagePasses(units, run, cluster, size) for units in stages]
    send = 0.0
    if run.pipeline > 1:
        # If a replica fits on one host, its stages send over the host's fast link.
        link = cluster.inside if run.stages_on_hosts(cluster) else cluster.between
        send = send_seconds(boundary, link)
    # A blocking send delays the sender and the receiver: half of both counts in each pass.
    blocked = 2 * send if run.blocking_sends else 0.0
    forward = [each.forward + blocked / 2 for each in passes]
    backward = [each.backward + blocked / 2 for each in passes]
    beside = 0.0 if run.blocking_sends else send
    length = pipeline_seconds(run.schedule, run.pipeline, run.micros, forward, backward, beside)
    ranks = [passes[rank :: run.pipeline] for rank in range(run.pipeline)]
    tails = [max(each.tail for each in held) for held in ranks]
    updates = [_update(held, run, cluster, size) for held in ranks]
    # The step ends when the slowest rank has updated. The other ranks wait (BUBBLE).
    end = max(t + sum(u.values()) for t, u in zip(tails, updates, strict=True))
    rank_times = []
    for rank, held in enumerate(ranks):
        kinds = _computed(held, run.micros)
        # Sends that do not block overlap computation, and appear only as waits.
        kinds[SEND] = blocked * len(held) * run.micros
        kinds[REDUCE] += tails[rank]
        kinds |= updates[rank]
        kinds[BUBBLE] = max(0.0, length + end - sum(kinds.values()))
        rank_times.append(RankTime(rank, kinds))
    return rank_times


class _StagePasses:
    """Seconds of one stage: forward, backward of a micro-batch, and `tail`.

    `tail` is the time after the last backward until all of its reductions are complete.
    """

    def __init__(
        self, units: Sequence[UnitWork], run: Parallelism, cluster: Cluster, size: Bytes
    ) -> None:
        self.units = units
        self.trained = sum(unit.gradients for unit in units)
        hidden = cluster.device.numbers.get("overlap", 1.0)
        times = [_unit_times(unit, run, cluster, size) for unit in units]
        self.forward = forward_pass(times, hidden=hidden).computed
        bare = backward_pass(times, reduced=False, hidden=hidden).computed
        last = backward_pass(times, reduced=True, hidden=hidden, overlap=run.overlap)
        each = run.placement.is_sharded("gradients")  # reduced after every micro-batch
        self.backward = bare
        if each and run.overlap:
            # The reductions that remain run in parallel with the next forward, if that is longer.
            self.backward = max(last.computed, last.reduced - self.forward)
        elif each:
            self.backward = last.reduced
        self.tail = last.reduced - self.backward
        # Waits are the difference to the same passes without any collective.
        alone = sum(each.forward + each.backward for each in times)
        self.gather_waits = max(0.0, self.forward + bare - alone)
        self.reduce_waits = max(0.0, self.backward - bare)


def _unit_times(unit: UnitWork, run: Parallelism, cluster: Cluster, size: Bytes) -> UnitTimes:
    group, row = run.data_group(cluster), run.placement
    # The engine's rule: only a sharded optimizer needs no whole gradient on each rank.
    reduce_seconds = reduce_scatter_seconds if row.is_sharded("optimizer") else all_reduce_seconds
    gather = 0.0
    if row.is_sharded("parameters"):
        gather = _by_bucket(all_gather_seconds, unit.parameters, size.parameter, group, size)
    return UnitTimes(
        unit.forward.seconds + unit.tensor_forward,
        unit.backward.seconds + unit.tensor_backward,
        gather,
        _by_bucket(reduce_seconds, unit.gradients, size.gradient, group, size),
    )


def _by_bucket(
    seconds: Callable[[float, Group], float],
    elements: float,
    each: float,
    group: Group,
    size: Bytes,
) -> float:
    """Return the seconds of a collective over `elements` of `each` bytes, bucket by bucket."""
    # Each bucket is one collective with its own latency, so their number matters, not only the
    # bytes.
    buckets = max(1, math.ceil(elements * size.parameter / size.bucket))
    return buckets * seconds(elements * each / buckets, group)


def _computed(held: Sequence[_StagePasses], micros: int) -> dict[str, float]:
    """Return the seconds of a rank's passes over all micro-batches, by kind."""
    units = [unit for each in held for unit in each.units]
    busy = sum((unit.forward + unit.backward for unit in units), Busy())
    kinds = {
        MATMUL: busy.matmul,
        MEMORY: busy.memory,
        LAUNCH: busy.launch,
        TENSOR: sum(unit.tensor_forward + unit.tensor_backward for unit in units),
        GATHER: sum(each.gather_waits for each in held),
        REDUCE: sum(each.reduce_waits for each in held),
    }
    return {kind: seconds * micros for kind, seconds in kinds.items()}


def _update(
    held: Sequence[_StagePasses], run: Parallelism, cluster: Cluster, size: Bytes
) -> dict[str, float]:
    """Return the seconds of the update on a rank, of its offload, and of publishing parameters."""
    trained = sum(each.trained for each in held)
    row, device = run.placement, cluster.device
    # With a sharded optimizer each rank updates its shard only.
    own = trained / run.data if row.is_sharded("optimizer") else trained
    seconds = {UPDATE: memory_seconds(own * size.update, device), PUBLISH: 0.0, OFFLOAD: 0.0}
    # Sharded parameters are gathered before their next use instead.
    if row.is_sharded("optimizer") and not row.is_sharded("parameters"):
        group = run.data_group(cluster)
        seconds[PUBLISH] = _by_bucket(all_gather_seconds, trained, size.parameter, group, size)
    tier = row.tier("optimizer").kind
    # On a CPU the host's memory is the device's own: there is no link to cross.
    if tier != "device" and device.number("host_gb_per_s"):
        seconds |= _offloaded(own, tier, size, device)
    return seconds


def _offloaded(own: float, tier: str, size: Bytes, device: Device) -> dict[str, float]:
    """Return the seconds of an update on the host.

    Gradients and parameters cross the device's link, and the update runs at the speed of the host's
    memory. With a disk, masters and two moments are read and written in parallel, and the slower
    one of the two counts.
    """
    over_link = own * (size.gradient + size.parameter) / needed(device, "host_gb_per_s")
    seconds = over_link + own * size.update / needed(device, "host_memory_gb_per_s")
    if tier == "nvme":
        seconds = max(seconds, own * size.on_disk / needed(device, "disk_gb_per_s"))
    return {UPDATE: 0.0, OFFLOAD: seconds}


def needed(device: Device, name: str) -> float:
    """Return the value `name` of a device. Raises ConfigError if the catalogue has none."""
    value = device.number(name)
    if value is None:
        raise ConfigError(
            f"The catalogue has no {name} for {device.name}, which this placement needs. Add it "
            "with its source in a file for --hardware."
        )
    return value
