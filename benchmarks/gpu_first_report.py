"""Shows the figures of gpu_first.py as a table of at most 60 lines, and in docs/speed.md."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 60
"""Lines of the table."""

NAMED = 8
"""Failures of one step that the table names; the others are counted."""

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"

TITLE = "## On one GPU"

GB = 1e9

Figures = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]
"""A head and rows of cells."""

HEADINGS = {
    "right": "Equality with plain PyTorch on one rank",
    "fast": "Compiled by block",
    "uncompiled": "Not compiled",
    "two-ranks": "Two ranks that share the GPU over Gloo",
    "offload": "Optimizer state on the host",
    "plan": "Predictions of `shardwise plan` next to measurements",
    "save": "One checkpoint",
    "largest": "The largest model that trains",
}


def failures(figures: Figures) -> list[str]:
    """Return one line for each thing that failed, with its exception."""
    found = []
    for name, step in figures["steps"].items():
        if step["error"]:
            found.append(f"{name}: {step['error']}")
        for key, row in step["rows"].items():
            if row.get("error"):
                found.append(f"{name}: {key}: {row['error']}")
            found += [
                f"{name}: {line['label']}: {exception_in(line['note'])}"
                for line in row.get("contenders", ())
                if line["note"].startswith(("failed", "does not fit"))
            ]
            found += [
                f"{name}: {line['label']}: not profiled: {line['not_profiled'].splitlines()[-1]}"
                for line in row.get("contenders", ())
                if line.get("not_profiled")
            ]
            if not row.get("losses_agree", True):
                apart = f"{row['loss_disagreement']:.1e}"
                found.append(f"{name}: losses of the contenders differ by {apart}")
        found += [f"{name}: {wrong}" for wrong in _wrong_bytes(step)]
    return found


def exception_in(text: str) -> str:
    """Return the line of the last exception in `text`, else its last line.

    CUDA errors have further lines of advice, and libraries warn when a process ends.
    """
    lines = text.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed|Fit|Interrupt|Skipped)(:|$)")


def _wrong_bytes(step: Figures) -> Iterator[str]:
    """Rows whose states are more than 2 % from the formula."""
    for line in step["rows"].get("result", {}).get("contenders", ()):
        if "state_bytes" in line:
            ratio = line["state_bytes"] / line["formula_bytes"]
            if abs(ratio - 1) > 0.02:
                yield f"{line['label']}: states take {ratio:.3f} x the formula"


def lines(figures: Figures) -> list[str]:
    """Return the table as text, at most MOST lines."""
    made = [_summary(figures)]
    for name, step in figures["steps"].items():
        cut = ", cut off" if step["cut"] else ""
        made.append(f"-- {_heading(name, step)} ({step['seconds']:.0f} s{cut})")
        if (table := _table(name, step)) is not None:
            made += _aligned(*table)
    wrong = failures(figures)
    shown = max(1, MOST - len(made) - 2)
    made += [f"FAILED {line[:150]}" for line in wrong[:shown]]
    if len(wrong) > shown:
        made.append(f"FAILED {len(wrong) - shown} more: see first.json")
    return [*made[: MOST - 1], f"{len(wrong)} failed" if wrong else "all passed"]


def _summary(figures: Figures) -> str:
    facts = figures["machine"]
    return f"{facts['device']}, {facts['date']}, {facts['commit']}, {facts['versions']}"


def _heading(name: str, step: Figures) -> str:
    """Return the heading of a step, with the workload if it has one."""
    result = step["rows"].get("result")
    if result is None:
        return HEADINGS[name]
    shape = result["configuration"]
    words = f"{shape['name']}, batch {shape['batch']} x {shape['sequence']}"
    return f"{HEADINGS[name]}: {words}, {result['setting']['precision']}"


def _table(name: str, step: Figures) -> Table | None:
    """The table of a step; None if it measured nothing."""
    rows = step["rows"]
    if not rows:
        return None
    if name == "right":
        passed = sum(not row["error"] for row in rows.values())
        return ["cases", "equal"], [[str(len(rows)), str(passed)]]
    if name in ("fast", "uncompiled", "offload"):
        return _of_race(rows["result"], offloaded=name == "offload")
    if name == "two-ranks":
        head = ["", "state GB", "formula GB", "peak GB", "last loss"]
        return head, [
            [
                line["label"],
                _number(line.get("state_bytes"), ".4f", GB),
                _number(line.get("formula_bytes"), ".4f", GB),
                _number(line["peak_bytes"], ".3f", GB),
                _number(line["losses"][-1] if line["losses"] else None, ".6f"),
            ]
            for line in rows["result"]["contenders"]
        ]
    if name == "plan":
        head = ["", "GB planned", "GB measured", "ratio", "ms planned", "ms measured", "ratio"]
        return head, [
            [
                key,
                *_pair(row, "bytes", ".2f", GB),
                *_pair(row, "ms", ".0f", 1.0),
            ]
            for key, row in rows.items()
        ]
    if name == "save":
        head = ["", "GB", "GB/s", "s", "stall ms", "step ms"]
        return head, [
            [
                key,
                _number(row.get("bytes"), ".2f", GB),
                _number(row.get("gb_per_s"), ".2f"),
                _number(row.get("seconds"), ".2f"),
                _number(row.get("stall_ms"), ".0f"),
                _number(row["step_ms"], ".0f"),
            ]
            for key, row in rows.items()
        ]
    head = ["", "parameters", "tokens/s", "peak GB"]
    return head, [
        [key, row["why"], "", ""]
        if "why" in row
        else [
            key,
            ("at least " if row["cut"] else "") + f"{row['parameters'] / 1e9:.2f}B",
            _number(row["tokens_per_s"], ",.0f"),
            _number(row["peak_bytes"], ".1f", GB),
        ]
        for key, row in rows.items()
        if not row["error"]
    ]


def _of_race(result: Figures, *, offloaded: bool) -> Table:
    """Contenders next to each other; `offloaded` adds the copies to and from the host."""
    shape = result["configuration"]
    tokens = shape["batch"] * shape["sequence"]
    head = ["", "ms", "tokens/s", "x plain", "MFU", "peak GB", "syncs", "kernels"]
    if offloaded:
        head += ["GB up", "hidden", "GB down", "hidden"]
    made = []
    for line in result["contenders"]:
        if line["median_ms"] is None:
            why = line["note"].partition(":")[0] or "no time"
            made.append([line["label"], why, *[""] * (len(head) - 2)])
            continue
        # Speed relative to plain: above 1 is faster.
        speed = line["over_plain"] and 1 / line["over_plain"]
        row = [
            line["label"],
            _number(line["median_ms"], ".1f"),
            # A simulated device takes no time.
            _number(1e3 * tokens / (line["median_ms"] or math.inf), ",.0f"),
            _number(speed, ".3f"),
            _number(line["mfu"], ".1%"),
            _number(line["peak_bytes"], ".2f", GB),
            _number(line.get("synchronisations"), ".1f"),
            _number(line.get("launches"), ".0f"),
        ]
        for way in ("up", "down") if offloaded else ():
            copies = line.get(way, {})
            row += [
                _number(copies.get("bytes"), ".2f", GB),
                _number(copies.get("hidden"), ".0%"),
            ]
        made.append(row)
    return head, made


def _pair(row: Figures, unit: str, form: str, scale: float) -> list[str]:
    """Return the planned figure, the measured one, and their ratio."""
    planned, measured = row.get(f"planned_{unit}"), row.get(f"measured_{unit}")
    ratio = planned / measured if planned and measured else None
    return [
        _number(planned, form, scale),
        _number(measured, form, scale),
        _number(ratio, ".2f"),
    ]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, form)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the first is aligned left, the others right."""
    whole = [head, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


# -- the section of docs/speed.md --------------------------------------------------------------


def publish(file: Path, results: Path) -> Path:
    """Keep `file` among the results under its date, and write the section of docs/speed.md."""
    figures = json.loads(file.read_text())
    kept = results / f"{figures['machine']['date'][:10]}-gpu-first.json"
    if file.resolve() != kept.resolve():
        shutil.copyfile(file, kept)
    before, _, _ = PAGE.read_text().partition(TITLE)
    PAGE.write_text(before + section(results))
    return kept


def section(results: Path) -> str:
    """Return the section of docs/speed.md for the newest figures in the folder `results`."""
    found = sorted(results.glob("*-gpu-first.json"))
    if not found:
        return (
            f"{TITLE}\n\nNot measured yet. `scripts/gpu first` measures it in nine minutes "
            "([its steps](../benchmarks/README.md#in-nine-minutes)). Order, host synchronisations "
            "and bytes are tested on a simulated device.\n"
        )
    figures = json.loads(found[-1].read_text())
    facts = figures["machine"]
    made = [
        TITLE,
        "",
        f"One {facts['device']}, {facts['date']}, {facts['versions']}, commit {facts['commit']}: "
        f"`scripts/gpu first` ([all figures](../benchmarks/results/{found[-1].name})). "
        "*x plain* is the speed relative to the plain loop of the same round.",
    ]
    for name, step in figures["steps"].items():
        table = _table(name, step)
        if table is None:
            continue
        head, rows = table
        made += ["", f"**{_heading(name, step)}.**", "", f"| {' | '.join(head)} |"]
        made.append("|---|" + "--:|" * (len(head) - 1))
        made += [f"| {' | '.join(row)} |" for row in rows]
    if wrong := failures(figures):
        made += ["", "What failed:", ""]
        made += [f"- {line}" for line in wrong]
    return "\n".join(made) + "\n"
