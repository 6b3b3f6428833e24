"""Searches a script's candidate placements on a cluster, by memory and then by time.

For each combination of mesh, placement, tier and recomputation, it chooses the largest micro-batch
that fits. If none fits, it chooses the smallest and reports how many bytes are missing.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.errors import ConfigError
from shardwise.launch import resources
from shardwise.layout.placement import DEVICE, Placement, Tier
from shardwise.messages.printable import in_bytes
from shardwise.tools.plan.choice import Choice, Estimate
from shardwise.tools.plan.cluster import HERE, Cluster
from shardwise.tools.plan.memory import Hardware, MemoryPlan, predict, predict_pipeline
from shardwise.tools.plan.meshes import AxisSizes, meshes
from shardwise.tools.plan.observe import PLAIN, ObservedStep, Way
from shardwise.tools.plan.record import StepRecord

RESERVED = 2 * 2**30
"""Bytes reserved on an accelerator for the driver, NCCL and fragmentation."""

HOST = Tier("cpu")

PER_STAGE = 4
"""Default number of micro-batches per pipeline rank, used without `--microbatches`."""


@dataclass(frozen=True)
class Line:
    """A candidate with its predicted memory and time (None if they could not be predicted).

    `over` is the number of bytes by which the candidate exceeds a device's memory, and `over_host`
    is the number by which it exceeds the device's share of the host's memory. Both are 0 if the
    candidate fits.
    """

    choice: Choice
    memory: MemoryPlan
    estimate: Estimate | None
    over: int
    over_host: int = 0

    @property
    def fits(self) -> bool:
        """Whether the candidate fits into the memory of the device and the host."""
        return not (self.over or self.over_host)


Clock = Callable[[StepRecord, Choice, Cluster], Estimate]
"""A function that predicts the time of a step, such as `clock.step_estimate`."""


def hardware_of(cluster: Cluster) -> Hardware:
    """Return whether devices have their own memory, and whether ranks share memory.

    On this machine without an accelerator, all ranks share the host's memory.
    """
    here = cluster.device.name.split("-")[0] == HERE
    on_host = here and not resources.gpu_count(os.environ)
    return Hardware(apart=not on_host, shares=on_host)


@dataclass(frozen=True)
class Question:
    """The input of a search: an observed script and the cluster to run it on.

    Attributes:
        steps: The observed step for each kind of observation.
        cluster: The cluster.
        clock: Function that predicts the time of a step, or None to predict only memory.
        disk: Folder for states offloaded to disk, or "" for none.
        excluded: Reasons why tensor, pipeline or context parallelism was not tried.
    """

    steps: dict[Way, ObservedStep]
    cluster: Cluster
    clock: Clock | None = None
    disk: str = ""
    excluded: tuple[str, ...] = ()
    _records: dict[tuple[Way, int], StepRecord] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        """Whether devices have their own memory, and whether ranks share memory."""
        return hardware_of(self.cluster)

    @property
    def capacity(self) -> int:
        """The number of bytes that a rank may use on its device."""
        memory = self.cluster.device.memory
        return memory - RESERVED if self.hardware.apart else memory

    @property
    def step(self) -> ObservedStep:
        """The step observed without tensor parallelism or recomputation."""
        return self.steps[PLAIN]

    @property
    def meshes(self) -> list[AxisSizes]:
        record = self.step.large
        layers = 0 if record.no_pipeline else len(record.layers)
        # Without context parallelism first, because of two equally fast meshes the first is listed.
        sizes = sorted({(w.tensor, w.context) for w in self.steps}, key=lambda size: size[::-1])
        total = record.total_batch
        if self.has_narrow_weights:  # the engine rejects them with split layers and experts
            return list(meshes(self.cluster, [size for size in sizes if size[0] == 1], 0, total))
        beside = {(w.tensor, w.context) for w in self.steps if w.tensor == 1 or w.spread}
        return list(meshes(self.cluster, sizes, layers, total, self.experts, sorted(beside)))

    @property
    def has_narrow_weights(self) -> bool:
        """True if frozen weights are stored in 4 bits."""
        return any(each.quantised for each in self.step.large.parameters)

    @property
    def experts(self) -> int:
        """The smallest number of experts in any layer, or 0 if the engine would not spread them."""
        record = self.step.large
        fused = any(each.experts and each.expert < 0 for each in record.parameters)
        fits = all(g.separable and (g.elementwise or not fused) for g in record.groups)
        divisible = all(each.divisible for each in record.routed)
        return min((r.experts for r in record.routed), default=0) if fits and divisible else 0

    def ways(self, mesh: AxisSizes) -> list[Way]:
        """Return the observations made with the mesh's tensor- and context-parallel sizes."""
        sizes = mesh.tensor, mesh.context, mesh.tensor > 1 and mesh.expert > 1
        return [way for way in self.steps if (way.tensor, way.context, way.spread) == sizes]

    def record(self, way: Way, samples: int) -> StepRecord:
        """Return the record of a micro-batch of `samples` samples, observed with `way`."""
        if (way, samples) not in self._records:
            # Cache it, because fitting a record takes longer than predicting from it, and many
            # placements use the same record.
            self._records[way, samples] = self.steps[way].at(samples)
        return self._records[way, samples]

    def sizes(self, mesh: AxisSizes) -> list[tuple[int, int]]:
        """Return pairs (samples per micro-batch, micro-batches per step), largest first.

        The first pair splits a replica's share of the batch as little as possible. If the training
        loop can split a step into micro-batches, each further pair halves their size.
        """
        record = self.step.large
        # Round up, because the replica with the most samples decides whether the placement fits.
        groups = mesh.data // mesh.context
        share = -(-record.total_batch // groups) if record.total_batch else record.batch_size
        counts = [min(share, PER_STAGE * mesh.pipeline) if mesh.pipeline > 1 else 1]
        # Two kinds of loop can split a batch: those with loader.steps() (`accumulates`), and those
        # with engine.forward_backward (which also allows a pipeline).
        cuts = bool(record.total_batch) and (record.accumulates or not record.no_pipeline)
        while cuts and 2 * counts[-1] <= share:
            counts.append(2 * counts[-1])
        return [(-(-share // count), count) for count in counts]


def search(question: Question) -> list[Line]:
    """Return all candidates. Those that fit are listed first, sorted from fastest to slowest."""
    lines = [
        line
        for mesh in question.meshes
        for row in _rows(question, mesh)
        for way in question.ways(mesh)
        if (line := _largest_that_fits(question, mesh, row, way)) is not None
    ]
    return sorted(lines, key=_order)


def _order(line: Line) -> tuple[bool, float, float, int]:
    # Sort by fit, then by time. Break ties by simplicity: fewer offloaded states, no recomputation,
    # fewer micro-batches, fewer ranks that split the model.
    choice = line.choice
    if not line.fits:
        return True, float(line.over + line.over_host), 0.0, 0
    seconds = line.estimate.seconds if line.estimate is not None else math.inf
    away = sum(tier.kind != "device" for tier in choice.row.tiers)
    split = choice.tensor * choice.pipeline * choice.expert * choice.context
    cost = away + choice.recomputed + choice.micro_batches / 1e3 + split
    return False, seconds, cost, choice.row.level


def _rows(question: Question, mesh: AxisSizes) -> Iterator[Placement]:
    """Yield the placements to try: ZeRO levels 0 to 3, with and without offloading.

    States are offloaded to host memory if it is separate from device memory, and to disk if there
    is a folder for them.
    """
    groups = question.step.large.groups
    separable = all(group.separable for group in groups)
    tiers = [HOST] if question.hardware.apart else []
    # The engine rejects state in 8 bits on a disk.
    if question.disk and not any(group.quantised for group in groups):
        tiers.append(Tier("nvme", question.disk))
    # Without data parallelism there is nothing to shard. Level 2 then differs only if states are
    # offloaded: gradients follow the optimizer state, while those of level 0 stay on the device.
    for level in range(4) if mesh.data > 1 else (0, 2):
        row = Placement.zero(level)
        # The engine rejects zero-bubble schedules with sharded parameters, and any sharding with an
        # optimizer that is not separable.
        split = mesh.schedule == "zero-bubble" and row.is_sharded("parameters")
        if split or (level and not separable):
            continue
        if mesh.data > 1 or not level:
            yield row
        for tier in tiers:
            if level in (0, 2, 3):
                yield row.resting(optimizer=tier)
            # The engine rejects frozen weights in 4 bits with offloaded parameters.
            if level == 3 and not question.has_narrow_weights:
                yield row.resting(parameters=tier, optimizer=tier)


def _largest_that_fits(
    question: Question, mesh: AxisSizes, row: Placement, way: Way
) -> Line | None:
    """Return the candidate that fits with the fewest micro-batches.

    If none fits, return the candidate with the most micro-batches. Returns None if no micro-batch
    size is possible.
    """
    line = None
    for samples, count in question.sizes(mesh):
        if not question.steps[way].knows(samples) or _is_excluded(mesh, way, count):
            continue
        line = measure(question, mesh, row, way, (samples, count))
        # Sizes are sorted from the largest, because splitting a batch into fewer micro-batches is
        # faster.
        if line.fits:
            return line
    return line


def _is_excluded(mesh: AxisSizes, way: Way, count: int) -> bool:
    """Return whether the engine would reject `count` micro-batches or `way`'s recomputation."""
    if mesh.schedule == "zero-bubble" and way.activations == "recomputed":
        return True
    # These two schedules run micro-batches in rounds of one per pipeline rank.
    return mesh.schedule in ("interleaved", "zero-bubble") and count % mesh.pipeline != 0


def measure(
    question: Question, mesh: AxisSizes, row: Placement, way: Way, size: tuple[int, int]
) -> Line:
    """Predict the memory and time of one candidate.

    `size` is the pair (samples per micro-batch, micro-batches per step).
    """
    record = question.record(way, size[0])
    choice = Choice(
        row=row,
        data=mesh.data,
        micro_batch=size[0],
        micro_batches=size[1],
        recomputed=way.activations == "recomputed",
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        schedule=mesh.schedule,
        expert=mesh.expert,
        context=mesh.context,
        context_method=way.method,
        in_rows=not record.no_pipeline,
    )
    predicted = predict_pipeline if mesh.pipeline > 1 else predict
    memory = predicted(record, choice, question.hardware)
    cluster = question.cluster
    estimate = None
    if question.clock is not None:
        try:
            estimate = question.clock(record, choice, cluster)
        except ConfigError:
            # The catalogue does not know every host's disk. List such a candidate without a time.
            if choice.row.tier("optimizer").kind != "nvme":
                raise
    # Host values of the catalogue are the share of one device, which one rank uses.
    share = cluster.device.number("host_memory_gib")
    over_host = max(0, memory.tiers.get("cpu", 0) - int(share)) if share else 0
    return Line(choice, memory, estimate, max(0, memory.peak - question.capacity), over_host)


def flags_of(line: Line) -> list[str]:
    """Return a candidate's flags for `shardwise run`, without the number of workers."""
    choice, row = line.choice, line.choice.row
    words = ["--zero", str(row.level)] if choice.data > 1 or row.level else []
    if choice.expert > 1:
        words += ["--expert", str(choice.expert)]
    if choice.context > 1:
        words += ["--context", str(choice.context), "--context-method", choice.context_method]
    if choice.tensor > 1:
        words += ["--tensor", str(choice.tensor)]
    if choice.pipeline > 1:
        words += ["--pipeline", str(choice.pipeline), "--schedule", choice.schedule]
    if row.tier("optimizer") != DEVICE:
        words += ["--offload-optimizer", str(row.tier("optimizer"))]
    if row.tier("parameters") != DEVICE:
        words += ["--offload-params", str(row.tier("parameters"))]
    if choice.pipeline > 1 or (choice.micro_batches > 1 and choice.in_rows):
        words += ["--microbatches", str(choice.micro_batches)]
    elif choice.micro_batches > 1:
        words += ["--micro-batch-size", str(choice.micro_batch)]
    if choice.recomputed:
        words += ["--activations", "recomputed"]
    return words


def command_of(
    line: Line, cluster: Cluster, flags: Sequence[str], words: Sequence[str]
) -> list[str]:
    """Return the command line that runs candidate `line`.

    `flags` are further flags of `shardwise run`, and `words` are the script and its arguments.
    """
    # `plan` does not know the host names, so the user must write the hostfile.
    several = ["--hostfile", "hosts"] if cluster.hosts > 1 else []
    run = ["shardwise", "run", "-n", str(line.choice.devices), *several, *flags_of(line), *flags]
    # Without "--", a script named -x.py would be parsed as a flag of `shardwise run`.
    named = words[0] != "-m" and words[0].startswith("-")
    return [*run, *(["--"] if named else []), *words]


def remedy(line: Line, lines: Sequence[Line]) -> str:
    """Return a hint for a candidate that does not fit: the most useful change and its peak."""
    others = [each for each in lines if _changes(each, line) == 1]
    # Prefer candidates that fit, even if others have a lower peak.
    others.sort(key=lambda each: (not each.fits, each.memory.peak))
    if not others or others[0].memory.peak >= line.memory.peak:
        largest = max(line.memory.at_peak().items(), key=lambda pair: pair[1])
        return f"the largest part is {largest[0]}, {in_bytes(largest[1])}"
    best = others[0]
    flags = shlex.join(flags_of(best)) or "no sharding"
    return f"{flags}: {in_bytes(best.memory.peak)}" + ("" if best.fits else ", still too much")


def _changes(one: Line, other: Line) -> int:
    """Return how many settings (level, tiers, recomputation, mesh axes) differ."""
    a, b = one.choice, other.choice
    return sum(
        (
            a.row.level != b.row.level,
            a.row.tiers != b.row.tiers,
            a.recomputed != b.recomputed,
            a.tensor != b.tensor,
            a.expert != b.expert,
            (a.context, a.context_method) != (b.context, b.context_method),
            (a.pipeline, a.schedule) != (b.pipeline, b.schedule),
        )
    )
