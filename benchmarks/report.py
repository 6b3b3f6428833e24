"""The table of one configuration in one setting: measured, as JSON, in Markdown, and its faults.

Tables are made of the JSON, so that a command prints today what markdown.py prints of a result file
next year.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import machine
import peaks
from contenders import LIBRARIES, Contender
from crew import Crew
from figure import GB, MB, milliseconds, number, table
from figures import AGREE, Line, disagreement, limit_scale, ratio
from neighbours import Neighbours, remark
from rounds import Budget, Plan, look_at_gpu, measure, weigh
from workloads import Setting, Workload, told

Row = Mapping[str, Any]
"""A contender in a result file."""

AGREE_ON_GPU = {"fp32": 1e-3, "tf32": 1e-2, "bf16-mixed": 5e-2, "bf16": 0.2}
"""By precision, how far the losses of two contenders may be apart at a step: GPUs sum in no fixed
order, and in bf16 three decimals are all there are."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The lines of one workload at one number of ranks, the plain loop's first if it takes part."""

    workload: Workload
    ranks: int
    lines: list[Line] = field(default_factory=list)
    cores: int = field(default_factory=machine.cores)
    setting: Setting = field(default_factory=Setting)
    device: str = "cpu"
    """The name of the device."""
    flops: int = 0
    """Of a step's forward and backward on the whole batch; 0 if unknown."""
    others: float | None = None
    """The share of the machine that other processes took meanwhile."""

    def line(self, key: str) -> Line | None:
        """Return the line of a contender if it took part."""
        return next((line for line in self.lines if line.key == key), None)

    @property
    def limit(self) -> float | None:
        """ms per step if the ranks shared one process's work and nothing else cost anything."""
        alone = self.line("plain")
        # On a GPU one process has the whole device: a part of its step limits nothing.
        if alone is None or alone.median is None or self.device != "cpu":
            return None
        return alone.median * limit_scale(self.ranks, self.cores)

    @property
    def agree_within(self) -> float:
        """Losses of contenders that did the same work differ by less."""
        on_cpu_in_fp32 = self.setting == Setting()
        return AGREE if on_cpu_in_fp32 else AGREE_ON_GPU[self.setting.precision]

    def as_json(self) -> dict[str, Any]:
        """Return all figures: those that were measured, and those that the tables show."""
        return {
            "configuration": told(self.workload),
            "setting": asdict(self.setting),
            "ranks": self.ranks,
            "cores": self.cores,
            "device": self.device,
            "tflop_per_step": self.flops / 1e12,
            "limit_ms": self.limit,
            "share_of_other_processes": self.others,
            "loss_disagreement": disagreement(self.lines),
            "losses_agree": disagreement(self.lines) < self.agree_within,
            "contenders": [self._line_json(line) for line in self.lines],
        }

    def _line_json(self, line: Line) -> dict[str, Any]:
        plain, scale = self.line("plain"), limit_scale(self.ranks, self.cores)
        ranks = 1 if line.key == "plain" else self.ranks  # it is alone
        flops = self.flops // self.ranks
        return {
            "key": line.key,
            "label": line.label,
            "note": line.note,
            "median_ms": line.median,
            "min_ms": line.fastest,
            "over_ddp": ratio(line, self.line("ddp")),
            "over_limit": ratio(line, plain, scale),
            "over_plain": ratio(line, plain),
            **self._over_own(line),
            "mfu": peaks.mfu(flops, line.median, self.device, self.setting.precision),
            "memory_bytes_per_rank": {
                "after_imports": line.empty,
                "between_steps": line.resident,
                "peak": line.peak,
            },
            "peak_bytes": line.peak,
            "peak_bytes_of_all_ranks": None if line.peak is None else line.peak * ranks,
            **line.device,
            "losses": line.losses,
            "rounds_ms": line.rounds,
        }

    def _over_own(self, line: Line) -> dict[str, float | None]:
        """Return the ratios of a library to itself over DDP and FSDP2, and to the engine's own loop
        in the same row."""
        library, _, zero = line.key.rpartition("-")
        prefix = f"{library}-" if library in LIBRARIES else ""
        # transformers' Trainer has no FSDP on the CPU: torch's own loop takes its place.
        sharded = self.line(f"{prefix}fsdp2") or self.line("fsdp2")
        engine = self.line(f"shardwise-{zero}") if prefix and zero.isdigit() else None
        return {
            "over_its_ddp": ratio(line, self.line(f"{prefix}ddp")),
            "over_its_fsdp": ratio(line, sharded),
            "over_engine": ratio(line, engine),
        }


def measured(
    result: Result,
    takers: Sequence[Contender],
    plan: Plan,
    limit: float,
    kept: Callable[[dict[str, Any]], None] = lambda result: None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """Fill the table of `result`, and return its JSON; calls `kept` with it after each round."""
    neighbours = Neighbours()
    case = f"{result.workload.name}, {result.ranks} ranks, {result.setting.precision}"

    def full(lines: list[Line]) -> dict[str, Any]:
        return replace(result, lines=lines, others=neighbours.share()).as_json()

    lines = measure(
        takers,
        plan,
        lambda who: Crew(who, result.workload, result.ranks, limit, result.setting),
        lambda turn: print(f"{case}, {turn}", file=sys.stderr, flush=True),
        lambda lines: kept(full(lines)),
        budget,
        weigh if result.setting.device == "cpu" else look_at_gpu,
    )
    return full(lines)


Columns = Sequence[tuple[str, Callable[[Row], str]]]

ON_CPU: Columns = (
    ("ms/step", lambda row: milliseconds(row["median_ms"])),
    ("x DDP", lambda row: number(row["over_ddp"], ".2f")),
    ("x limit", lambda row: number(row["over_limit"], ".2f")),
    ("MB/rank, peak", lambda row: number(row["memory_bytes_per_rank"]["peak"], ".0f", MB)),
    ("MB, all ranks", lambda row: number(row.get("peak_bytes_of_all_ranks"), ".0f", MB)),
    ("loss", lambda row: number(row["losses"][-1] if row["losses"] else None, ".4f")),
)

BRIDGES: Columns = (
    ("ms/step", lambda row: milliseconds(row["median_ms"])),
    ("x DDP", lambda row: number(row["over_its_ddp"], ".3f")),
    ("x FSDP", lambda row: number(row["over_its_fsdp"], ".3f")),
    ("x engine", lambda row: number(row["over_engine"], ".3f")),
)

ON_GPU: Columns = (
    ("ms/step", lambda row: milliseconds(row["median_ms"])),
    ("spread", lambda row: _spread(row["rounds_ms"])),
    ("x plain", lambda row: number(row["over_plain"], ".2f")),
    ("MFU", lambda row: number(row["mfu"], ".1%")),
    ("peak GB", lambda row: number(row["peak_bytes"], ".2f", GB)),
    ("launches", lambda row: number(row.get("launches"), ".0f")),
    ("syncs", lambda row: number(row.get("synchronisations"), ".1f")),
    ("loss", lambda row: number(row["losses"][-1] if row["losses"] else None, ".4f")),
)


def _spread(rounds: Sequence[Sequence[float]]) -> str:
    """How far apart the rounds' medians are, or within one round its steps, over the median."""
    values = list(map(median, rounds)) if len(rounds) > 1 else [ms for r in rounds for ms in r]
    middle = median(values) if values else 0.0
    return f"{(max(values) - min(values)) / middle:.0%}" if middle else "-"


def markdown(result: Row, columns: Columns = ON_CPU) -> list[str]:
    """Return the lines of a table, and of the remark below it."""
    title = f"{result['configuration']['name']}, {result['ranks']} ranks"
    if result["limit_ms"] is not None and columns is ON_CPU:
        title += f" (limit {milliseconds(result['limit_ms'])} ms)"
    rows = []
    for row in result["contenders"]:
        cells = [row["note"].splitlines()[0]] if row["note"] else [show(row) for _, show in columns]
        rows.append([row["label"], *cells])
    said = f"Losses agree to {result['loss_disagreement']:.1e}"
    others = remark(result["share_of_other_processes"])
    said += f"; {others}." if others else "."
    return ["", *table([title, *(name for name, _ in columns)], rows), "", said]


def faults(results: Sequence[Row]) -> list[str]:
    """Return why a run is worthless: contenders that failed, or that did not do the same work."""
    found = []
    for result in results:
        case = f"{result['configuration']['name']}, {result['ranks']} ranks"
        found += [
            f"{case}: {row['label']} {row['note']}"
            for row in result["contenders"]
            if row["note"].startswith("failed")
        ]
        if not result["losses_agree"]:
            found.append(
                f"{case}: losses differ by {result['loss_disagreement']:.1e}, so the contenders "
                "did not all do the same work"
            )
    return found
