"""Plan is what `shardwise plan` found: a script's placements, those that fit first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.planning import search
from shardwise.planning.catalogue import read_catalogue
from shardwise.planning.clock import ScriptClock
from shardwise.planning.cluster import Cluster, parse_cluster
from shardwise.planning.cost import Cost, cost_of, is_within
from shardwise.planning.observe import Script, observe_sizes
from shardwise.planning.record import StepRecord
from shardwise.planning.search import Line, Question


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of the command. `tokens` are those to train on in all, `within` days and
    `budget` dollars."""

    script: Script
    on: str
    tokens: float | None = None
    within: float | None = None
    budget: float | None = None
    hardware: tuple[Path, ...] = ()
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
        return self.question.steps["kept"].large

    @property
    def best(self) -> Line | None:
        """The first that fits; None where none does."""
        return next((line for line in self.lines if line.fits), None)

    def command(self, line: Line) -> str:
        """The command that trains by `line`."""
        script = self.request.script
        return search.command_of(line, self.cluster, script.flags, script.words)

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

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "on": str(self.cluster),
            "capacity_bytes": self.question.capacity,
            "script": list(self.request.script.words),
            "batch_size": self.record.total_batch,
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


def make_plan(request: PlanRequest) -> Plan:
    """Observe the script and search. Raises LaunchError for one that cannot be observed,
    ConfigError for an unknown cluster."""
    cluster = parse_cluster(request.on, read_catalogue(request.hardware))
    steps = {"kept": observe_sizes(request.script, activations="kept")}
    question = Question(steps, cluster, ScriptClock())
    lines = search.search(question)
    if not all(line.fits and line.choice.micro_batches == 1 for line in lines):
        # It costs a third of the time of forward and backward: looked at only where memory lacks.
        steps["recomputed"] = observe_sizes(request.script, activations="recomputed")
        lines = search.search(question)
    return Plan(request, question, lines)


def plan(
    script: str | Sequence[str],
    *,
    on: str,
    tokens: float | None = None,
    within: float | None = None,
    budget: float | None = None,
    **settings: str,
) -> Plan:
    """What `shardwise plan --on ON SCRIPT` finds: placements of a training, those that fit first.

    `script` is a path, or the words of a command line; `on` a cluster such as "8xH100". `tokens` is
    how many to train on, `within` the days and `budget` the dollars for it. `settings` are flags of
    the run, such as precision="bf16-mixed". Raises LaunchError for a script that cannot be
    observed, and names its line.
    """
    words = (script,) if isinstance(script, str) else tuple(script)
    flags = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    return make_plan(PlanRequest(Script(words, tuple(flags)), on, tokens, within, budget))


def tokens_per_sample(record: StepRecord) -> int:
    """How many tokens a sample has: the length of the batch's rows of whole numbers, else 1."""
    rows = [
        each.shape[1]
        for each in record.tensors
        if each.source == "batch" and each.dtype == "int64" and len(each.shape) == 2
    ]
    return max(rows, default=1)
