"""The figures of gpu_first.py as a table of at most 60 lines, and as a section of docs/speed.md."""

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import figure
from figure import GB, number
from report import Columns, Row

MOST = 60
"""Lines of the table."""

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"

TITLE = "## On one GPU"

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

RACE: Columns = (
    ("ms", lambda row: number(row["median_ms"], ".1f")),
    ("tokens/s", lambda row: number(_tokens_per_s(row), ",.0f")),
    # Speed relative to plain: above 1 is faster.
    ("x plain", lambda row: number(row["over_plain"] and 1 / row["over_plain"], ".3f")),
    ("MFU", lambda row: number(row["mfu"], ".1%")),
    ("peak GB", lambda row: number(row["peak_bytes"], ".2f", GB)),
    ("syncs", lambda row: number(row.get("synchronisations"), ".1f")),
    ("kernels", lambda row: number(row.get("launches"), ".0f")),
)

COLUMNS: dict[str, Columns] = {
    "fast": RACE,
    "uncompiled": RACE,
    "offload": (
        *RACE,
        ("GB up", lambda row: number(row.get("up", {}).get("bytes"), ".2f", GB)),
        ("hidden", lambda row: number(row.get("up", {}).get("hidden"), ".0%")),
        ("GB down", lambda row: number(row.get("down", {}).get("bytes"), ".2f", GB)),
        ("hidden", lambda row: number(row.get("down", {}).get("hidden"), ".0%")),
    ),
    "two-ranks": (
        ("state GB", lambda row: number(row.get("state_bytes"), ".4f", GB)),
        ("formula GB", lambda row: number(row.get("formula_bytes"), ".4f", GB)),
        ("peak GB", lambda row: number(row["peak_bytes"], ".3f", GB)),
        ("last loss", lambda row: number(row["losses"][-1] if row["losses"] else None, ".6f")),
    ),
    "plan": (
        ("GB planned", lambda row: number(row.get("planned_bytes"), ".2f", GB)),
        ("GB measured", lambda row: number(row.get("measured_bytes"), ".2f", GB)),
        ("ratio", lambda row: _planned_over_measured(row, "bytes")),
        ("ms planned", lambda row: number(row.get("planned_ms"), ".0f")),
        ("ms measured", lambda row: number(row.get("measured_ms"), ".0f")),
        ("ratio", lambda row: _planned_over_measured(row, "ms")),
    ),
    "save": (
        ("GB", lambda row: number(row.get("bytes"), ".2f", GB)),
        ("GB/s", lambda row: number(row.get("gb_per_s"), ".2f")),
        ("s", lambda row: number(row.get("seconds"), ".2f")),
        ("stall ms", lambda row: number(row.get("stall_ms"), ".0f")),
        ("step ms", lambda row: number(row["step_ms"], ".0f")),
    ),
    "largest": (
        ("parameters", lambda row: "at least " * row["cut"] + f"{row['parameters'] / 1e9:.2f}B"),
        ("tokens/s", lambda row: number(row["tokens_per_s"], ",.0f")),
        ("peak GB", lambda row: number(row["peak_bytes"], ".1f", GB)),
    ),
}
"""By step. A row is a contender of its result, or a row that the step wrote."""


def _tokens_per_s(row: Row) -> float:
    # A simulated device takes no time.
    return 1e3 * row["tokens"] / (row["median_ms"] or math.inf)


def _planned_over_measured(row: Row, unit: str) -> str:
    planned, measured = row.get(f"planned_{unit}"), row.get(f"measured_{unit}")
    return number(planned / measured if planned and measured else None, ".2f")


def failures(figures: Row) -> list[str]:
    """Return one line for each failure, with its exception."""
    found = []
    for name, step in figures["steps"].items():
        if step["error"]:
            found.append(f"{name}: {step['error']}")
        for key, row in step["rows"].items():
            if row.get("error"):
                found.append(f"{name}: {key}: {row['error']}")
            found += [f"{name}: {wrong}" for wrong in _wrong_contenders(row)]
            if not row.get("losses_agree", True):
                apart = f"{row['loss_disagreement']:.1e}"
                found.append(f"{name}: losses of the contenders differ by {apart}")
    return found


def _wrong_contenders(row: Row) -> Iterator[str]:
    """Yield the faults of a result's contenders."""
    for line in row.get("contenders", ()):
        if line["note"].startswith(("failed", "does not fit")):
            yield f"{line['label']}: {exception_in(line['note'])}"
        if why := line.get("not_profiled"):
            yield f"{line['label']}: not profiled: {why.splitlines()[-1]}"
        if "state_bytes" in line:
            ratio = line["state_bytes"] / line["formula_bytes"]
            if abs(ratio - 1) > 0.02:
                yield f"{line['label']}: states take {ratio:.3f} x the formula"


def exception_in(text: str) -> str:
    """Return the line of the last exception in `text`, else its last line.

    CUDA errors have further lines of advice, and libraries warn when a process ends.
    """
    lines = text.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed|Fit|Interrupt|Skipped)(:|$)")


def lines(figures: Row) -> list[str]:
    """Return the table as text, at most MOST lines."""
    facts = figures["machine"]
    made = [f"{facts['device']}, {facts['date']}, {facts['commit']}, {facts['versions']}"]
    for name, step in figures["steps"].items():
        cut = ", cut off" if step["cut"] else ""
        made.append(f"-- {_heading(name, step)} ({step['seconds']:.0f} s{cut})")
        made += _aligned(_table(name, step))
    wrong = failures(figures)
    shown = max(1, MOST - len(made) - 2)
    made += [f"FAILED {line[:150]}" for line in wrong[:shown]]
    if len(wrong) > shown:
        made.append(f"FAILED {len(wrong) - shown} more: see first.json")
    return [*made[: MOST - 1], f"{len(wrong)} failed" if wrong else "all passed"]


def _heading(name: str, step: Row) -> str:
    """Return the heading of a step, with the workload if it has one."""
    result = step["rows"].get("result")
    if result is None:
        return HEADINGS[name]
    shape = result["configuration"]
    words = f"{shape['name']}, batch {shape['batch']} x {shape['sequence']}"
    return f"{HEADINGS[name]}: {words}, {result['setting']['precision']}"


def _table(name: str, step: Row) -> list[list[str]]:
    """Return the head and the rows of a step's table; nothing if it measured nothing."""
    rows = step["rows"]
    if not rows:
        return []
    if name == "right":
        passed = sum(not row["error"] for row in rows.values())
        return [["cases", "equal"], [str(len(rows)), str(passed)]]
    if "result" in rows:
        shape = rows["result"]["configuration"]
        tokens = shape["batch"] * shape["sequence"]
        rows = {line["label"]: line | {"tokens": tokens} for line in rows["result"]["contenders"]}
    columns = COLUMNS[name]
    made = [["", *(head for head, _ in columns)]]
    for label, row in rows.items():
        if name == "largest" and row["error"]:
            continue  # it stands among the failures
        if "median_ms" in row and row["median_ms"] is None:
            cells = [row["note"].partition(":")[0] or "no time"]
        else:
            cells = [row["why"]] if "why" in row else [show(row) for _, show in columns]
        made.append([label, *cells, *[""] * (len(columns) - len(cells))])
    return made


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return columns of equal width; the first is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


# -- the section of docs/speed.md --------------------------------------------------------------


def publish(file: Path, results: Path) -> Path:
    """Keep `file` among the results under its date, and write the section of docs/speed.md."""
    kept = file.resolve()
    if not (kept.parent == results.resolve() and kept.match("*-gpu-first.json")):
        day = json.loads(file.read_text())["machine"]["date"][:10]
        names = (f"{day}{number}-gpu-first.json" for number in ("", *"bcdefghijklmnopqrstuvwxyz"))
        kept = next(results / name for name in names if not (results / name).exists())
        shutil.copyfile(file, kept)
    before, _, _ = PAGE.read_text().partition(TITLE)
    PAGE.write_text(before + section(results))
    return kept


def _run(file: Path) -> str:
    """Return the name of the run that wrote `file`: its date, and a letter after the first."""
    return file.name.removesuffix("-gpu-first.json")


def section(results: Path) -> str:
    """Return the section of docs/speed.md: of each step, the newest figures in `results`."""
    newest: dict[str, tuple[Path, Row]] = {}
    steps: Row = {}
    for file in sorted(results.glob("*-gpu-first.json")):
        figures = json.loads(file.read_text())
        found = {name: step for name, step in figures["steps"].items() if _table(name, step)}
        newest |= dict.fromkeys(found, (file, figures["machine"]))
        steps |= found
    if not newest:
        return (
            f"{TITLE}\n\nSpeed on a GPU has not been measured yet. `scripts/gpu first` measures it "
            "in nine minutes ([its steps](../benchmarks/README.md#in-nine-minutes)). The order of "
            "operations, host synchronisations and byte counts are tested on a simulated device.\n"
        )
    made = [
        TITLE,
        "",
        "`scripts/gpu first` measures these. *x plain* is the speed relative to the plain loop of "
        "the same round. Shardwise reads the loss and the norm in every step, so the host waits "
        "once per step; the plain loop never waits. FSDP2 computes in bf16 by its own policy, as "
        "Shardwise does in the rows *bf16 with fp32 masters*; all other rows use autocast, which "
        "keeps norms and residual sums in fp32.",
    ]
    made.append("")
    for file, facts in dict(newest[n] for n in HEADINGS if n in newest).items():
        words = f"one {facts['device']}, {facts['versions']}, commit {facts['commit']}"
        made += [f"- [{_run(file)}](../benchmarks/results/{file.name}): {words}"]
    for name in (each for each in HEADINGS if each in newest):
        file, _ = newest[name]
        step = steps[name]
        table = _table(name, step)
        heading = f"**{_heading(name, step)} ({_run(file)}).**"
        made += ["", heading, "", *figure.table(table[0], table[1:])]
        wrong = failures({"steps": {name: step}})
        made += [f"\nFailed: {line.partition(': ')[2]}" for line in wrong]
    return "\n".join(made) + "\n"
