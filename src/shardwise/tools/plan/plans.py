"""Makes a plan: observes a script in the ways that its placements need, and searches these."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.messages.printable import in_bytes
from shardwise.tools.plan import search
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.clock import step_estimate
from shardwise.tools.plan.cluster import Cluster, parse_cluster
from shardwise.tools.plan.cost import Cost, cost_of, is_within
from shardwise.tools.plan.meshes import tensor_sizes
from shardwise.tools.plan.observe import ObservedStep, OnRun, Script, observe_sizes
from shardwise.tools.plan.record import StepRecord
from shardwise.tools.plan.search import Line, Question, Way

OWN_BATCHES = ("accelerate", "transformers", "lightning")
"""Libraries that give every worker batches of its own, with --adopt."""

LONGEST = 8
"""Bytes of the longest element: float64."""


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of the command. `tokens` are those to train on in all, `within` days and
    `budget` dollars, `disk` a folder for states on a disk."""

    script: Script
    on: str
    tokens: float | None = None
    within: float | None = None
    budget: float | None = None
    hardware: tuple[Path, ...] = ()
    disk: str = ""
    explain: bool = False
    json_file: Path | None = None
    page: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What `shardwise plan` found: placements, those that fit first.

    Attributes: `lines`, `cluster`, `record` (the observed step with its activations kept).
    """

    request: PlanRequest
    question: Question
    lines: list[Line] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        """The devices that were planned for."""
        return self.question.cluster

    @property
    def record(self) -> StepRecord:
        """The step as it was observed."""
        return self.question.step.large

    @property
    def best(self) -> Line | None:
        """The first that fits; None where none does."""
        return next((line for line in self.lines if line.fits), None)

    def command(self, line: Line) -> str:
        """The command that trains by `line`, for a shell or `shlex.split`."""
        return shlex.join(self.command_words(line))

    def command_words(self, line: Line) -> list[str]:
        """The same as words."""
        script = self.request.script
        flags = (*script.flags, *(("--adopt", script.adopt) if script.adopt else ()))
        return search.command_of(line, self.cluster, flags, script.words)

    def cost(self, line: Line) -> Cost | None:
        """Days, dollars and kWh until `tokens` are trained on; None where neither they nor seconds
        are known."""
        if self.request.tokens is None or line.estimate is None:
            return None
        steps = self.request.tokens / (line.choice.samples * tokens_per_sample(self.record))
        estimate = line.estimate
        return cost_of(estimate.seconds, estimate.error, steps, self.cluster, line.choice.devices)

    def is_within(self, line: Line) -> bool:
        """Whether it is done within the days and the dollars that were given."""
        cost = self.cost(line)
        return cost is None or is_within(cost, self.request.within, self.request.budget)

    def notes(self) -> list[str]:
        """What the figures leave out, what was not tried and why, and what was assumed."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        question, record = self.question, self.record
        if question.hardware.apart:
            yield (
                f"counted against {in_bytes(question.capacity)}: {in_bytes(search.RESERVED)} of a "
                "device are left to its driver, NCCL and gaps between allocations"
            )
        else:
            yield (
                "counted are bytes of tensors: Python, libraries, workspaces of kernels and free "
                "blocks that the C library keeps take memory of this host too"
            )
        if self.best is not None:
            yield (
                "a save at once needs no more than a step; one in the background holds a copy, of "
                f"at most {in_bytes(saved_bytes(self.best, record))} a rank by the first "
                "placement, in the host's memory"
            )
        used = max((line.choice.devices for line in self.lines), default=self.cluster.devices)
        if used < self.cluster.devices:
            yield (
                f"the batch of {record.total_batch} gives {used} of {self.cluster.devices} devices "
                "a sample: raise it to use more"
            )
        if (why := question.step.difference()) and record.total_batch:
            yield f"other micro-batches were not tried: {why}"
        elif not record.accumulates and record.no_pipeline and record.total_batch:
            yield (
                "micro-batches were not tried: the script's loop takes each batch in one backward "
                "(loader.steps() in the loop changes that)"
            )
        if not record.total_batch:
            yield (
                "no sw.Loader cuts the batch: every worker is planned with the rows that one "
                "worker took here, whatever their number"
            )
        yield from question.excluded
        yield from (f"assumed: {each}" for each in record.assumed)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "on": str(self.cluster),
            "capacity_bytes": self.question.capacity,
            "script": list(self.request.script.words),
            "batch_size": self.record.total_batch,
            "notes": self.notes(),
            "assumed": [str(each) for each in self.record.assumed],
            "placements": [self._line_as_json(line) for line in self.lines],
        }

    def _line_as_json(self, line: Line) -> dict[str, Any]:
        estimate = line.estimate
        return {
            "command": self.command(line),
            "fits": line.fits,
            "peak_bytes": line.memory.peak,
            "peak_at": line.memory.where,
            "bytes_at_peak": line.memory.at_peak(),
            "states_bytes": line.memory.states,
            "tier_bytes": line.memory.tiers,
            "missing_bytes": line.over,
            "missing_host_bytes": line.over_host,
            "seconds_per_step": None if estimate is None else estimate.seconds,
            "error": None if estimate is None else estimate.error,
            "cost": None if (cost := self.cost(line)) is None else asdict(cost),
            "within": self.is_within(line),
        }


def make_plan(request: PlanRequest, on_run: OnRun = lambda _: None) -> Plan:
    """Observe the script and search; `on_run` is told of each observation.

    Raises LaunchError for a script that cannot be observed, ConfigError for an unknown cluster.
    """
    cluster = parse_cluster(request.on, read_catalogue(request.hardware))
    steps: dict[Way, ObservedStep] = {
        ("kept", 1): observe_sizes(request.script, activations="kept", on_run=on_run)
    }
    excluded = list(_observe_parts(request.script, cluster, steps, on_run))
    question = Question(steps, cluster, step_estimate, request.disk, tuple(excluded))
    lines = search.search(question)
    if not any(line.fits and line.choice.micro_batches == 1 for line in lines):
        # It costs a third of the time of forward and backward: looked at only where memory lacks.
        for _, parts in list(steps):
            steps["recomputed", parts] = observe_sizes(
                request.script, activations="recomputed", tensor=parts, on_run=on_run
            )
        lines = search.search(question)
    return Plan(request, question, lines)


def _observe_parts(
    script: Script, cluster: Cluster, steps: dict[Way, ObservedStep], on_run: OnRun
) -> Iterator[str]:
    """Observe the script's tensor-parallel parts; says why where it has none, or no pipeline."""
    if owner := next((name for name in script.adopt.split(",") if name in OWN_BATCHES), None):
        if cluster.devices > 1:
            yield (
                f"--tensor and --pipeline were not tried: {owner} gives every worker batches of "
                "its own, and the workers of a replica need the same"
            )
        return
    for parts in tensor_sizes(cluster)[1:]:
        try:
            steps["kept", parts] = observe_sizes(
                script, activations="kept", tensor=parts, on_run=on_run
            )
        except LaunchError as error:
            yield f"--tensor {parts} was not tried: {error}"
            break
    if cluster.devices > 1 and (why := steps["kept", 1].large.no_pipeline):
        stages = "a PipelineModule says how many stages it has" if script.adopt else why
        yield f"--pipeline was not tried: {stages}"


def tokens_per_sample(record: StepRecord) -> int:
    """How many tokens a sample has: the length of the batch's rows of whole numbers, else 1."""
    rows = [
        each.shape[1]
        for each in record.tensors
        if each.source == "batch" and each.dtype == "int64" and len(each.shape) == 2
    ]
    return max(rows, default=1)


def saved_bytes(line: Line, record: StepRecord) -> int:
    """At most the bytes that one rank has of a checkpoint: its part of parameters and optimizer
    state, of which each replica of a replicated state writes a part; frozen parameters that no
    bucket has, likewise; on rank 0 the buffers too."""
    row, states, data = line.choice.row, line.memory.states, line.choice.data
    replicated = [line.memory.at_peak()["frozen"]]
    found = record.buffer_bytes
    for name in ("parameters", "optimizer"):
        if row.is_sharded(name):
            found += states[name]
        else:
            replicated.append(states[name])
    found += sum(-(-nbytes // data) for nbytes in replicated)
    return found + (rounding_bytes(record) if data > 1 else 0)


def rounding_bytes(record: StepRecord) -> int:
    """Return at most the bytes by which a part is longer than an even one.

    That is an element of each bucket, which has one parameter or more: of the parameters, of their
    masters and of each moment.
    """
    kinds = 2 + max((len(group.moments) for group in record.groups), default=0)
    return LONGEST * kinds * len(record.parameters)
