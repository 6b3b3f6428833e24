"""One table of the result, on the screen and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from figures import AGREE, Line, disagreement, limit_scale, ratio
from neighbours import remark
from residents import MB
from workloads import Workload, told

Column = tuple[str, Callable[[Line], str]]


@dataclass(frozen=True)
class Result:
    """The lines of one configuration at one number of ranks, one process first."""

    workload: Workload
    ranks: int
    cores: int
    lines: list[Line]
    others: float | None = None
    """The share of the machine that other processes took meanwhile."""

    @property
    def scale(self) -> float:
        return limit_scale(self.ranks, self.cores)

    @property
    def limit(self) -> float | None:
        """ms per step if the ranks shared one process's work and nothing else cost anything."""
        alone = self.lines[0].median
        return None if alone is None else alone * self.scale

    def over_ranks(self, each: float | None, line: Line) -> float | None:
        """A contender's bytes per rank, summed over its ranks."""
        return None if each is None else each * (1 if line is self.lines[0] else self.ranks)

    @property
    def steps_compared(self) -> int:
        """The number of steps after which the losses are shown."""
        return max((len(line.losses) for line in self.lines), default=0)

    def line(self, key: str) -> Line | None:
        """The line of a contender, if it took part."""
        return next((line for line in self.lines if line.key == key), None)

    def over_limit(self, line: Line) -> float | None:
        """This contender's step over the limit of the same round."""
        return ratio(line, self.lines[0], self.scale)

    def over_ddp(self, line: Line) -> float | None:
        """This contender's step over DDP's of the same round."""
        return ratio(line, self.line("ddp"))


def table(result: Result) -> Table:
    """The table as rich draws it."""
    limit = "" if result.limit is None else f" · limit {milliseconds(result.limit)} ms"
    drawn = Table(
        box=SIMPLE,
        title=f"{result.workload.describe()} · {result.ranks} ranks{limit}",
        title_justify="left",
        title_style="bold",
    )
    columns = _columns(result)
    drawn.add_column("", no_wrap=True)
    for name, _ in columns:
        drawn.add_column(name, justify="right")
    for line in result.lines:
        if line.note:
            drawn.add_row(line.label, _short(line.note), *[""] * (len(columns) - 1), style="dim")
        else:
            drawn.add_row(line.label, *(show(line) for _, show in columns), style=_style(line))
    return drawn


def remarks(result: Result) -> str:
    """What a reader of the table has to know before believing it."""
    said = f"losses agree to {disagreement(result.lines):.1e}"
    return "; ".join(part for part in (said, remark(result.others)) if part)


def as_json(results: Sequence[Result], machine: dict[str, str], method: dict[str, Any]) -> Any:
    """Everything that was measured, and the figures that the tables show."""
    return {"machine": machine, "method": method, "results": [_result_json(r) for r in results]}


def faults(results: Sequence[Result]) -> list[str]:
    """What makes a run worthless: contenders that failed, or that did not do the same work."""
    found = [
        f"{result.workload.name}, {result.ranks} ranks: {line.label} {line.note}"
        for result in results
        for line in result.lines
        if line.note.startswith("failed")
    ]
    for result in results:
        apart = disagreement(result.lines)
        if apart >= AGREE:
            found.append(
                f"{result.workload.name}, {result.ranks} ranks: losses differ by {apart:.1e}, so "
                "the contenders did not all do the same work"
            )
    return found


def _columns(result: Result) -> list[Column]:
    return [
        ("ms/step", lambda line: milliseconds(line.median)),
        ("fastest", lambda line: milliseconds(line.fastest)),
        ("x DDP", lambda line: _number(result.over_ddp(line), ".2f")),
        ("x limit", lambda line: _number(result.over_limit(line), ".2f")),
        ("MB/rank", lambda line: _number(line.resident, ".0f", MB)),
        ("peak", lambda line: _number(line.peak, ".0f", MB)),
        ("peak, all", lambda line: _number(result.over_ranks(line.peak, line), ".0f", MB)),
        (
            f"loss, {result.steps_compared} steps",
            lambda line: _number(line.losses[-1] if line.losses else None, ".4f"),
        ),
    ]


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "configuration": told(result.workload),
        "ranks": result.ranks,
        "cores": result.cores,
        "limit_ms": result.limit,
        "share_of_other_processes": result.others,
        "loss_disagreement": disagreement(result.lines),
        "contenders": [_line_json(result, line) for line in result.lines],
    }


def _line_json(result: Result, line: Line) -> dict[str, Any]:
    return {
        "key": line.key,
        "label": line.label,
        "note": line.note,
        "median_ms": line.median,
        "min_ms": line.fastest,
        "over_ddp": result.over_ddp(line),
        "over_limit": result.over_limit(line),
        "memory_bytes_per_rank": {
            "after_imports": line.empty,
            "between_steps": line.resident,
            "peak": line.peak,
        },
        "peak_bytes_of_all_ranks": result.over_ranks(line.peak, line),
        "losses": line.losses,
        "rounds_ms": line.rounds,
    }


def milliseconds(value: float | None) -> str:
    """Three figures or so: `712`, `7.1`."""
    return _number(value, ".0f" if value is not None and value >= 100 else ".1f")


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, form)


def _short(note: str) -> str:
    """The first words of a note; the whole of it is printed below the tables."""
    return note if note.startswith("not installed") else note.partition(":")[0]


def _style(line: Line) -> str:
    return "bold" if line.key.startswith("shardwise") else ""
