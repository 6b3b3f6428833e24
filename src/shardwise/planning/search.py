"""Searches the placements of a script on a cluster: memory first, then time.

For each row, tier and way to keep activations the largest micro-batch that fits is taken; where
none fits, the smallest, with what it lacks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.launch import resources
from shardwise.placement import DEVICE, Placement, Tier
from shardwise.planning.choice import Choice, Clock, Estimate
from shardwise.planning.cluster import HERE, Cluster
from shardwise.planning.memory import Hardware, MemoryPlan, predict
from shardwise.planning.observe import ObservedStep
from shardwise.printable import in_bytes

RESERVED = 2 * 2**30
"""Bytes of an accelerator that are left to its driver, NCCL and gaps between allocations."""

HOST = Tier("cpu")


@dataclass(frozen=True)
class Line:
    """A placement with its memory, and its time where a clock says it. `over` is how many bytes it
    lacks on a device, and `over_host` on a host; 0 where it fits."""

    choice: Choice
    memory: MemoryPlan
    estimate: Estimate | None
    over: int
    over_host: int = 0

    @property
    def fits(self) -> bool:
        """Whether device and host have room for it."""
        return not (self.over or self.over_host)


@dataclass(frozen=True)
class Question:
    """A script that was observed, by its activations; the cluster, and who says the time."""

    steps: dict[str, ObservedStep]
    cluster: Cluster
    clock: Clock | None = None

    @property
    def hardware(self) -> Hardware:
        """The memory of the devices; without accelerators ranks of this machine compute where
        their host's memory is."""
        here = self.cluster.device.name.split("-")[0] == HERE
        on_host = here and not resources.gpu_count(os.environ)
        return Hardware(apart=not on_host, shares=on_host)

    @property
    def capacity(self) -> int:
        """Bytes that a rank may have on its device."""
        memory = self.cluster.device.memory
        return memory - RESERVED if self.hardware.apart else memory

    @property
    def data(self) -> int:
        """Ranks that get samples: no more than the batch has."""
        total = self._any.large.total_batch
        return min(self.cluster.devices, total) if total else self.cluster.devices

    @property
    def _any(self) -> ObservedStep:
        return next(iter(self.steps.values()))

    def samples(self) -> list[int]:
        """Sizes of a micro-batch that can be asked for, the largest first: a rank's share of the
        batch, and halves of that where the script's loop takes micro-batches."""
        record = self._any.large
        share = -(-record.total_batch // self.data) if record.total_batch else record.batch_size
        sizes = [share]
        while record.accumulates and record.total_batch and sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return sizes


def search(question: Question) -> list[Line]:
    """All placements, those that fit first and the fastest of them first."""
    lines = [
        _largest_that_fits(question, row, activations)
        for row in _rows(question)
        for activations in question.steps
    ]
    return sorted(lines, key=_order)


def _order(line: Line) -> tuple[bool, float, float, int]:
    if not line.fits:
        return True, float(line.over + line.over_host), 0.0, 0
    seconds = line.estimate.seconds if line.estimate is not None else 0.0
    away = sum(tier.kind != "device" for tier in line.choice.row.tiers)
    cost = away + line.choice.recomputed + line.choice.micro_batches / 1e3
    return False, seconds, cost, line.choice.row.level


def _rows(question: Question) -> Iterator[Placement]:
    """The rows of the table, with tiers where the host's memory is another one."""
    levels = range(4) if question.data > 1 else (0,)
    separable = all(group.separable for group in question._any.large.groups)
    for level in levels:
        row = Placement.zero(level)
        if level and not separable:
            continue
        yield row
        if not question.hardware.apart:
            continue
        if level in (0, 2, 3):
            yield row.resting(optimizer=HOST)
        if level == 3:
            yield row.resting(parameters=HOST, optimizer=HOST)


def _largest_that_fits(question: Question, row: Placement, activations: str) -> Line:
    line = None
    for size in question.samples():
        line = measure(question, row, activations, size)
        if line.fits:
            return line
    assert line is not None
    return line


def measure(question: Question, row: Placement, activations: str, size: int) -> Line:
    """One placement, with micro-batches of `size` samples."""
    record = question.steps[activations].at(size)
    share = question.samples()[0]
    choice = Choice(
        row=row,
        data=question.data,
        micro_batch=size,
        micro_batches=-(-share // size),
        recomputed=activations == "recomputed",
    )
    memory = predict(record, choice, question.hardware)
    device, cluster = question.cluster.device, question.cluster
    host = device.number("host_memory_gib")
    on_host = memory.tiers.get("cpu", 0) * min(cluster.per_host, choice.devices)
    estimate = question.clock.seconds(record, choice, cluster) if question.clock else None
    return Line(
        choice,
        memory,
        estimate,
        max(0, memory.peak - question.capacity),
        max(0, on_host - int(host)) if host else 0,
    )


def flags_of(line: Line) -> list[str]:
    """The flags of `shardwise run` for a placement, the number of workers left out."""
    choice, row = line.choice, line.choice.row
    words = ["--zero", str(row.level)] if choice.data > 1 else []
    if row.tier("optimizer") != DEVICE:
        words += ["--offload-optimizer", str(row.tier("optimizer"))]
    if row.tier("parameters") != DEVICE:
        words += ["--offload-params", str(row.tier("parameters"))]
    if choice.micro_batches > 1:
        words += ["--micro-batch-size", str(choice.micro_batch)]
    if choice.recomputed:
        words += ["--activations", "recomputed"]
    return words


def command_of(line: Line, cluster: Cluster, flags: Sequence[str], words: Sequence[str]) -> str:
    """The command that trains so, as it is typed."""
    several = ["--hostfile", "hosts"] if cluster.hosts > 1 else []
    run = ["shardwise", "run", "-n", str(line.choice.devices), *several, *flags_of(line), *flags]
    return shlex.join([*run, *words])


def remedy(line: Line, lines: Sequence[Line], question: Question) -> str:
    """What would help a placement that does not fit, and how much: the change of one thing that
    leaves the least."""
    others = [each for each in lines if _changes(each, line) == 1]
    others.sort(key=lambda each: (not each.fits, each.memory.peak))
    if not others or others[0].memory.peak >= line.memory.peak:
        largest = max(line.memory.at_peak().items(), key=lambda pair: pair[1])
        return f"the largest part is {largest[0]}, {in_bytes(largest[1])}"
    best = others[0]
    so = shlex.join(flags_of(best)) or "no sharding"
    return f"{so}: {in_bytes(best.memory.peak)}" + ("" if best.fits else ", which is too much too")


def _changes(one: Line, other: Line) -> int:
    """In how many of row, tiers and activations two placements differ."""
    a, b = one.choice, other.choice
    return sum(
        (a.row.level != b.row.level, a.row.tiers != b.row.tiers, a.recomputed != b.recomputed)
    )
