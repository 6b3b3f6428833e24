"""Builds a plan: observes a script with each setting that a search needs, then runs the search."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError
from shardwise.layout.placement import STATES
from shardwise.messages.printable import in_bytes, many
from shardwise.tools.plan import search
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.clock import step_estimate
from shardwise.tools.plan.cluster import Cluster, parse_cluster
from shardwise.tools.plan.cost import Cost, cost_of, is_within
from shardwise.tools.plan.meshes import context_sizes, tensor_sizes
from shardwise.tools.plan.observe import (
    PLAIN,
    ObservedStep,
    OnRun,
    Script,
    Way,
    observe_sizes,
    warm_observers,
)
from shardwise.tools.plan.record import StepRecord
from shardwise.tools.plan.search import Line, Question
from shardwise.tools.plan.stage_records import part_of, stage_layers

Observe = Callable[[Way], ObservedStep]
"""Observes the script once."""

OWN_BATCHES = ("accelerate", "transformers", "lightning")
"""Libraries that give every worker its own batches when they run with --adopt."""

METHODS = ("ulysses", "gathered")
"""The values of --context-method to try."""

LONGEST = 8
"""Size in bytes of the largest element type, float64."""


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `shardwise plan`.

    Attributes:
        script: The script to observe.
        on: The cluster spec, such as "8xH100".
        tokens: Total number of tokens to train on, or None if unknown.
        within: Time limit in days.
        budget: Cost limit in dollars.
        hardware: Additional catalogue files or folders.
        disk: Folder for states offloaded to disk, or "" for none.
        context: Context-parallel size to try, or 0 to try several if the script needs them.
        explain: Whether to print the tensors at the peak.
        json_file: Path of the JSON output.
        page: Folder for the HTML page.
    """

    script: Script
    on: str
    tokens: float | None = None
    within: float | None = None
    budget: float | None = None
    hardware: tuple[Path, ...] = ()
    disk: str = ""
    context: int = 0
    explain: bool = False
    json_file: Path | None = None
    page: Path | None = None


@dataclass(frozen=True)
class Plan:
    """The result of `shardwise plan`.

    Attributes:
        request: The arguments of the command.
        question: The observed script and the cluster.
        lines: The candidates. Those that fit are listed first, sorted from fastest to slowest.

    Example::

        found = sw.plan("train.py", on="8xH100")
        if found.best is not None:
            print(found.command(found.best))
    """

    request: PlanRequest
    question: Question
    lines: list[Line] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        """The cluster for which the plan was made."""
        return self.question.cluster

    @property
    def record(self) -> StepRecord:
        """The step observed with the script's own batch size and without recomputation."""
        return self.question.step.large

    @property
    def best(self) -> Line | None:
        """The fastest candidate that fits, or None if none fits."""
        return next((line for line in self.lines if line.fits), None)

    def command(self, line: Line) -> str:
        """Return the shell command that trains with candidate `line`."""
        return shlex.join(self.command_words(line))

    def command_words(self, line: Line) -> list[str]:
        """Return the command that trains with candidate `line`, as a list of arguments."""
        script = self.request.script
        flags = (*script.flags, *(("--adopt", script.adopt) if script.adopt else ()))
        return search.command_of(line, self.cluster, flags, script.words)

    def cost(self, line: Line) -> Cost | None:
        """Return the cost of training on `request.tokens` with candidate `line`.

        Returns None if the number of tokens or the step time is unknown.
        """
        if self.request.tokens is None or line.estimate is None:
            return None
        steps = self.request.tokens / (line.choice.samples * tokens_per_sample(self.record))
        estimate = line.estimate
        return cost_of(estimate.seconds, estimate.error, steps, self.cluster, line.choice.devices)

    def is_within(self, line: Line) -> bool:
        """Return whether a run with candidate `line` is within the request's days and dollars."""
        cost = self.cost(line)
        return cost is None or is_within(cost, self.request.within, self.request.budget)

    def notes(self) -> list[str]:
        """Return notes on the figures' limits, settings that were not tried, and assumptions."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        question, record = self.question, self.record
        if question.hardware.apart:
            yield (
                f"counted against {in_bytes(question.capacity)}: {in_bytes(search.RESERVED)} of a "
                "device are reserved for its driver, NCCL and gaps between allocations"
            )
        else:
            yield (
                "only bytes of tensors are counted: Python, libraries, workspaces of kernels and "
                "free blocks of the C library also take memory of this host"
            )
        if self.best is not None:
            yield (
                "a synchronous save needs no more memory than a step; a background save holds a "
                f"copy, of at most {in_bytes(saved_bytes(self.best, record))} per rank with the "
                "first placement, in the host's memory"
            )
        cost = None if self.best is None else self.cost(self.best)
        if cost is not None and cost.dollars is not None:
            yield (
                "$ is a range: the lowest price per hour in the catalogue with the shortest "
                "estimated time, to the highest price with the longest time (± of the time)"
            )
        copies = (0, 0) if self.best is None else self.best.memory.second_copies
        if self.best is not None and any(copies) and self._can_survive(self.best.choice):
            held, sent = map(in_bytes, copies)
            yield (
                f"with --survive, the first placement also holds {held} of second copies per "
                f"worker, sends {sent} more per worker and step, and needs memory for the full "
                "optimizer state after a loss"
            )
        used = max((line.choice.devices for line in self.lines), default=self.cluster.devices)
        if used < self.cluster.devices:
            yield (
                f"the batch of {record.total_batch} samples is enough for {used} of "
                f"{self.cluster.devices} devices: raise it to use more"
            )
        if (why := question.step.difference()) and record.total_batch:
            yield f"other micro-batches were not tried: {why}"
        elif not record.accumulates and record.no_pipeline and record.total_batch:
            yield (
                "micro-batches were not tried: the script's loop runs one backward per batch "
                "(use loader.steps() in the loop to change that)"
            )
        # Without an sw.Loader, the script itself chooses the number of rows per worker, which may
        # depend on the number of workers.
        if not record.total_batch:
            yield (
                "no sw.Loader divides the batch: the plan gives every worker as many rows as one "
                "worker has here, at every number of workers"
            )
        yield from self._context_notes()
        yield from question.excluded
        yield from (f"assumed: {each}" for each in record.assumed)

    def _context_notes(self) -> Iterator[str]:
        """Yield the bytes that attention sends with each context-parallel size and method."""
        steps = self.question.steps
        kept = [w for w in steps if w.activations == "kept" and w.tensor == 1]
        sent = {way: steps[way].large for way in kept if way.context > 1}
        for context in sorted({way.context for way in sent}):
            methods = " and ".join(
                f"{in_bytes(record.sent_bytes)} with {way.method}"
                for way, record in sent.items()
                if way.context == context
            )
            batch = many(self.record.batch_size, "sample")
            yield (
                f"with --context {context}, attention sends {methods} per worker and micro-batch "
                f"of {batch}"
            )
        if sent:
            yield (
                "a run with --context first tests the model: everything except attention must "
                "process each token independently"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the plan as values that JSON can represent."""
        return {
            "on": str(self.cluster),
            "capacity_bytes": self.question.capacity,
            "script": list(self.request.script.words),
            "batch_size": self.record.total_batch,
            "notes": self.notes(),
            "assumed": [str(each) for each in self.record.assumed],
            "placements": [self._line_as_json(line) for line in self.lines],
        }

    def _can_survive(self, choice: Choice) -> bool:
        """Return whether a run with this placement holds second copies of the estimated size."""
        record = self.record
        on_disk = any(choice.row.tier(state).kind == "nvme" for state in STATES)
        quantised = any(group.quantised for group in record.groups)
        quantised = quantised or any(each.quantised for each in record.parameters)
        # Experts have other copies. With a single context group, there are none (engine/build.py).
        others = choice.expert > 1 or choice.context == choice.data
        return not (self.question.hardware.apart or on_disk or quantised or others)

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
            "context_bytes": self._context_bytes(line),
            "second_copies_bytes": line.memory.second_copies[0],
            "second_copies_sent_bytes": line.memory.second_copies[1],
            "missing_bytes": line.over,
            "missing_host_bytes": line.over_host,
            "seconds_per_step": None if estimate is None else estimate.seconds,
            "error": None if estimate is None else estimate.error,
            "cost": None if (cost := self.cost(line)) is None else asdict(cost),
            "within": self.is_within(line),
        }

    def _context_bytes(self, line: Line) -> int:
        """Return the bytes that a rank sends for attention in a step."""
        choice, question = line.choice, self.question
        activations = "recomputed" if choice.recomputed else "kept"
        way = Way(
            activations,
            choice.tensor,
            choice.context,
            choice.context_method,
            choice.tensor > 1 and choice.expert > 1,
        )
        record = question.record(way, choice.micro_batch)
        if choice.pipeline == 1:
            return record.sent_bytes * choice.micro_batches
        rows = stage_layers(record, choice.pipeline * choice.stages_per_rank)
        stages = [part_of(record, layers).sent_bytes for layers in rows]
        most = max(sum(stages[rank :: choice.pipeline]) for rank in range(choice.pipeline))
        return most * choice.micro_batches


def make_plan(request: PlanRequest, on_run: OnRun = lambda _: None) -> Plan:
    """Observe the script and search its candidates.

    `on_run` is called before each run of the script. Raises LaunchError if the script cannot be
    observed, and ConfigError if the cluster spec is invalid.
    """
    cluster = parse_cluster(request.on, read_catalogue(request.hardware))
    fuses = search.hardware_of(cluster).apart
    request = replace(request, script=replace(request.script, fuses=fuses))
    with warm_observers(request.script) as warm:
        observe = partial(observe_sizes, request.script, on_run=on_run, warm=warm)
        steps: dict[Way, ObservedStep] = {PLAIN: observe(PLAIN)}
        excluded = list(_observe_parts(request.script, cluster, steps, observe))
        # `question` refers to `steps`. Recomputation is added to it below if it is needed.
        question = Question(steps, cluster, step_estimate, request.disk, tuple(excluded))
        lines = search.search(question)
        is_short = not any(line.fits and line.choice.micro_batches == 1 for line in lines)
        # Parts of sequences save memory, and employ devices that would have no samples.
        is_idle = all(line.choice.devices < cluster.devices for line in lines)
        if request.context or is_short or is_idle:
            # Layers split next to sequences save more memory, but take many observations.
            splits = bool(request.context) or is_short
            excluded += _observe_contexts(request, cluster, steps, observe, splits=splits)
            question = replace(question, excluded=tuple(excluded))
            lines = search.search(question)
        if is_short:
            # Recomputation adds a second forward pass, about a third of the work. Try it only if
            # memory is short.
            excluded += _observe_recomputed(steps, observe)
            question = replace(question, excluded=tuple(excluded))
            lines = search.search(question)
    return Plan(request, question, lines)


def _observe_contexts(
    request: PlanRequest,
    cluster: Cluster,
    steps: dict[Way, ObservedStep],
    observe: Observe,
    *,
    splits: bool,
) -> Iterator[str]:
    """Observe the script with each context-parallel size and method, and add results to `steps`.

    If `splits` is true, also observes them with each tensor-parallel size in `steps`. If a size or
    method is impossible, yields the reason.
    """
    sizes = [request.context] if request.context else context_sizes(cluster)
    if request.context and cluster.devices % request.context:
        fits = [n for n in range(1, cluster.devices + 1) if cluster.devices % n == 0]
        raise ConfigError(
            f"--context {request.context} does not divide {cluster.devices} devices. Write one of "
            f"{', '.join(map(str, fits))}."
        )
    if not (request.context or steps[PLAIN].large.attends):
        return  # most models without attention have no sequences
    failed: dict[str, str] = {}
    for size in sizes:
        for method in METHODS:
            # A model that cannot run on 2 parts cannot run on 4 either. Heads that cannot be
            # spread over 2 ranks cannot be spread over 4.
            if method in failed:
                continue
            way = Way(context=size, method=method)
            try:
                steps[way] = observe(way)
            except LaunchError as error:
                failed[method] = str(error)
                yield f"--context {size} with {method} was not tried: {error}"
                continue
            for split in _split_ways(way, cluster, steps) if splits else []:
                try:
                    steps[split] = observe(split)
                except LaunchError as error:
                    axes = f"--tensor {split.tensor}" + " --expert" * split.spread
                    yield f"--context {size} with {method} and {axes} was not tried: {error}"


def _observe_recomputed(steps: dict[Way, ObservedStep], observe: Observe) -> Iterator[str]:
    """Observe each of `steps` with recomputation, and add the results. Yield why one fails."""
    for way in list(steps):
        recomputed = way._replace(activations="recomputed")
        try:
            steps[recomputed] = observe(recomputed)
        except LaunchError as error:
            yield f"{recomputed} was not tried: {error}"


def _split_ways(way: Way, cluster: Cluster, steps: Mapping[Way, ObservedStep]) -> list[Way]:
    """Return `way` with each tensor-parallel size whose groups fit on one host with it."""
    return [
        way._replace(tensor=each.tensor, spread=each.spread)
        for each in list(steps)
        if each.context == 1
        and each.tensor > 1
        and each.tensor * way.context <= cluster.per_host
        and cluster.devices % (each.tensor * way.context) == 0
    ]


def _owner_of_batches(script: Script) -> str | None:
    """Return the adopted library that gives every worker its own batches, or None."""
    return next((name for name in script.adopt.split(",") if name in OWN_BATCHES), None)


def _observe_parts(
    script: Script,
    cluster: Cluster,
    steps: dict[Way, ObservedStep],
    observe: Observe,
) -> Iterator[str]:
    """Observe the script with each tensor-parallel size, and add the results to `steps`.

    If tensor or pipeline parallelism is impossible, yields the reason.
    """
    if owner := _owner_of_batches(script):
        if cluster.devices > 1:
            yield (
                f"--tensor and --pipeline were not tried: {owner} gives every worker separate "
                "batches, but the workers of one replica need the same batch"
            )
        return
    # Size 1 is already observed. A model that cannot be split into 2 parts cannot be split into 4
    # either. But its layers may be split if its experts stay whole, or only together with them.
    failed: set[bool] = set()
    for parts, spread in product(tensor_sizes(cluster)[1:], (False, True)):
        if spread in failed or (spread and Question(steps, cluster).experts < parts):
            continue
        way = Way(tensor=parts, spread=spread)
        try:
            steps[way] = observe(way)
        except LaunchError as error:
            failed.add(spread)
            beside = " together with --expert" if spread else ""
            yield f"--tensor {parts} was not tried{beside}: {error}"
    if cluster.devices > 1 and (why := steps[PLAIN].large.no_pipeline):
        stages = "a PipelineModule defines its number of stages" if script.adopt else why
        yield f"--pipeline was not tried: {stages}"


def tokens_per_sample(record: StepRecord) -> int:
    """Return the number of tokens per sample: the row length of an int64 tensor in the batch, or 1.

    If the batch contains several such tensors, the longest row length counts. Their shape is (rows,
    length) or, with `sequence_dim=0`, (length, rows).
    """
    shapes = [
        each.shape
        for each in record.tensors
        if each.source == "batch" and each.dtype == "int64" and len(each.shape) == 2
    ]
    return max((_length_of(shape, record.batch_size) for shape in shapes), default=1)


def _length_of(shape: Sequence[int], rows: int) -> int:
    return shape[0] if shape[1] == rows != shape[0] else shape[1]


def saved_bytes(line: Line, record: StepRecord) -> int:
    """Return an upper bound on the bytes that one rank saves in a checkpoint.

    A rank saves its shard of parameters and optimizer state. Replicated states and frozen
    parameters are divided among the replicas. Rank 0 also saves the module buffers.
    """
    row, states = line.choice.row, line.memory.states
    # Only the ranks with the same experts divide them, which makes this an upper bound for others.
    choice = line.choice
    data = min(choice.data, choice.data * choice.tensor // choice.expert)
    replicated = [line.memory.at_peak()["frozen"]]
    total = record.buffer_bytes
    for name in ("parameters", "optimizer"):
        if row.is_sharded(name):
            total += states[name]
        else:
            replicated.append(states[name])
    # Round up, because if a size does not divide evenly, one replica saves the larger part.
    total += sum(-(-nbytes // data) for nbytes in replicated)
    return total + (rounding_bytes(record) if data > 1 else 0)


def rounding_bytes(record: StepRecord) -> int:
    """Return an upper bound on the number of bytes by which a shard exceeds an even share.

    For each bucket, this is one element of the parameters, of the masters and of each moment. There
    are at most as many buckets as parameters.
    """
    kinds = 2 + max((len(group.moments) for group in record.groups), default=0)
    return LONGEST * kinds * len(record.parameters)
