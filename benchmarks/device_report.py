"""The table of one model in one precision on one device, on the screen and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from figures import Line, disagreement, ratio
from peaks import PEAKS, mfu
from report import milliseconds
from workloads import Setting, Workload, told

GB = 1e9

AGREE = {"fp32": 1e-3, "tf32": 1e-2, "bf16-mixed": 5e-2, "bf16": 0.2}
"""By precision, how far the losses of two contenders may be apart at a step: GPUs sum in no fixed
order, and in bf16 three decimals are all there are."""

Column = tuple[str, Callable[[Line], str]]


@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """The lines of one workload in one setting, the plain loop's first where it takes part."""

    workload: Workload
    setting: Setting
    ranks: int
    device: str
    """The name of the device."""
    flops: int
    """Of a step's forward and backward on the whole batch."""
    lines: list[Line]

    def mfu(self, line: Line) -> float | None:
        """The share of the devices' arithmetic that a contender's step has used."""
        return mfu(self.flops // self.ranks, line.median, self.device, self.setting.precision)

    def over_plain(self, line: Line) -> float | None:
        """A contender's step over the plain loop's of the same round."""
        plain = next((each for each in self.lines if each.key == "plain"), None)
        if plain is None or not all(plain.per_round):
            return None
        return ratio(line, plain)


def look(line: Line, steps: int, told: list[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    """Write what the ranks told of their device and what was seen in `steps` traced steps into a
    line, per step; of ranks the one that has most of each."""
    line.peak = max((each["peak"] for each in told if "peak" in each), default=None)
    for name in ("launches", "synchronisations"):
        counts = [each[name] for each in seen if each[name] is not None]
        line.device[name] = max(counts) / steps if counts else None
    if why := next((each["why_not"] for each in seen if each.get("why_not")), ""):
        line.device["not_profiled"] = why
    for way in ("up", "down"):
        copies = max((each["copies"][way] for each in seen), key=lambda c: c["nbytes"] or 0)
        nbytes, took = copies["nbytes"], copies["took"]
        line.device[way] = {
            "copies": copies["count"] / steps,
            "bytes": None if nbytes is None else nbytes / steps,
            "gb_per_s": nbytes / took / 1e3 if nbytes and took else None,
            "hidden": copies["hidden"],
        }


def table(result: DeviceResult, *, offloaded: bool) -> Table:
    """The table as rich draws it; `offloaded` adds what goes between host and device."""
    title = f"{result.workload.describe()} · {result.setting.describe()}"
    drawn = Table(box=SIMPLE, title=title, title_justify="left", title_style="bold")
    columns = _columns(result) + (list(_of_copies()) if offloaded else [])
    drawn.add_column("", no_wrap=True)
    for name, _ in columns:
        drawn.add_column(name, justify="right")
    for line in result.lines:
        if line.note:
            drawn.add_row(line.label, line.note.partition(":")[0], style="dim")
        else:
            drawn.add_row(line.label, *(show(line) for _, show in columns))
    return drawn


def remarks(result: DeviceResult) -> Iterator[str]:
    """What a reader of the table has to know before believing it."""
    peak = PEAKS.get(result.device)
    words = f"{peak.of(result.setting.precision)} TFLOP/s, {peak.source}" if peak else "unknown"
    yield f"{result.flops / 1e12:.2f} TFLOP in a step; peak of {result.device}: {words}"
    rounds = [len(line.rounds) for line in result.lines if line.rounds]
    yield f"rounds: {min(rounds, default=0)} to {max(rounds, default=0)}; {_agreement(result)}"
    for line in result.lines:
        if line.note:
            yield f"{line.label}: {line.note}"
        if why := line.device.get("not_profiled"):
            yield f"{line.label} was not profiled: {why}"


def _agreement(result: DeviceResult) -> str:
    return f"losses agree to {disagreement(result.lines):.1e}"


def faults(result: DeviceResult) -> list[str]:
    """What makes a table worthless: a contender that failed, or that did other work."""
    found = [f"{line.label} {line.note}" for line in result.lines if line.note.startswith("failed")]
    if disagreement(result.lines) >= AGREE[result.setting.precision]:
        found.append(
            f"{_agreement(result)} only, and {AGREE[result.setting.precision]} is allowed in "
            f"{result.setting.precision}: the contenders did not all do the same work"
        )
    return [f"{result.workload.name}, {result.setting.describe()}: {each}" for each in found]


def as_json(result: DeviceResult) -> dict[str, Any]:
    """Everything that was measured, and the figures that the table shows."""
    return {
        "configuration": told(result.workload),
        "setting": asdict(result.setting),
        "ranks": result.ranks,
        "device": result.device,
        "tflop_per_step": result.flops / 1e12,
        "loss_disagreement": disagreement(result.lines),
        "contenders": [
            {
                "key": line.key,
                "label": line.label,
                "note": line.note,
                "median_ms": line.median,
                "over_plain": result.over_plain(line),
                "mfu": result.mfu(line),
                "peak_bytes": line.peak,
                **line.device,
                "losses": line.losses,
                "rounds_ms": line.rounds,
            }
            for line in result.lines
        ],
    }


def _columns(result: DeviceResult) -> list[Column]:
    return [
        ("ms/step", lambda line: milliseconds(line.median)),
        ("spread", _spread),
        ("x plain", lambda line: _number(result.over_plain(line), ".2f")),
        ("MFU", lambda line: _number(result.mfu(line), ".1%")),
        ("peak GB", lambda line: _number(line.peak, ".2f", GB)),
        ("launches", lambda line: _number(line.device.get("launches"), ".0f")),
        ("syncs", lambda line: _number(line.device.get("synchronisations"), ".1f")),
        ("loss", lambda line: _number(line.losses[-1] if line.losses else None, ".4f")),
    ]


OF_COPIES = (
    ("GB", "bytes", ".2f", GB),
    ("GB/s", "gb_per_s", ".1f", 1.0),
    ("hidden", "hidden", ".0%", 1.0),
)
"""Of the copies one way: a column's head, the figure, and how it is written."""


def _of_copies() -> Iterator[Column]:
    for way in ("up", "down"):
        for head, name, form, unit in OF_COPIES:
            yield f"{head} {way}", _figure(way, name, form, unit)


def _figure(way: str, name: str, form: str, unit: float) -> Callable[[Line], str]:
    return lambda line: _number(line.device.get(way, {}).get(name), form, unit)


def _spread(line: Line) -> str:
    """How far apart the rounds' medians are, or within one round its steps, over the median."""
    values = line.per_round if len(line.per_round) > 1 else [ms for r in line.rounds for ms in r]
    middle = median(values) if values else 0.0
    return f"{(max(values) - min(values)) / middle:.0%}" if middle else "-"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, form)
