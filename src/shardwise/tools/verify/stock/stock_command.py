"""Shows and writes the result of `shardwise verify --stock`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwise.errors import LaunchError
from shardwise.messages.printable import printable
from shardwise.tools.report.output import exit_on_sigterm, finite, is_stdout, machine_facts
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.report import STYLES
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import stock_flow
from shardwise.tools.verify.stock.stock_flow import StockResult
from shardwise.tools.verify.stock.stock_runs import StockCommand, StockRuns
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict

FAILED = 1
LINES_OF_OUTPUT = 60


def verify(
    command: StockCommand,
    steps: int,
    out: Path,
    *,
    accepts_rounding: bool,
    json_file: Path | None,
    junit: Path | None,
) -> int:
    """Verify a stock script, print what was found, and return the exit code."""
    for path in (json_file, junit):
        if path is not None and not path.parent.is_dir() and not is_stdout(path):
            raise LaunchError(f"{path} cannot be written: there is no folder {path.parent}.")
    console = Console(highlight=False, markup=False, stderr=is_stdout(json_file))
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(highlight=False, markup=False, stderr=True),
        transient=True,
    )
    logs = out / "verify-logs"
    logs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    try:
        with exit_on_sigterm(), StockRuns(command, steps, logs, progress) as runs, progress:
            result = stock_flow.verify(runs)
    except RunFailed as error:
        for line in error.output.strip().splitlines()[-LINES_OF_OUTPUT:]:
            console.print(printable(line), style="dim", soft_wrap=True)
        console.print(f"shardwise: {printable(str(error))}", style="red", soft_wrap=True)
        console.print(f"Nothing is proved. All output is in {logs}.", style="red", soft_wrap=True)
        return FAILED
    said = sentences(result)
    for number, sentence in enumerate(said):
        style = STYLES[result.verdict] if number == 0 else None
        console.print(printable(sentence), style=style, soft_wrap=True)
    accepted = accepts_rounding and result.verdict is TrainingVerdict.ROUNDING
    code = 0 if accepted else result.verdict.value
    text = json.dumps(as_json(command, result, code), indent=2)
    (out / "verify.json").write_text(text)
    if is_stdout(json_file):
        print(text)
    elif json_file is not None:
        json_file.write_text(text)
    if junit is not None:
        _write_junit(junit, command, said, code, time.monotonic() - begun)
    return code


def sentences(result: StockResult) -> list[str]:
    """Return what to say about a result, the verdict first."""
    rows = sorted(set(result.rows))
    batch = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
    steps = f"{result.steps} step{'s' * (result.steps != 1)}"
    own = verdicts.format_difference(result.own.largest)
    judged = verdicts.format_difference(result.judged.largest)
    said = []
    if result.findings:
        said.append(f"Differs from one process: {result.findings[0].words}")
        said += [f"Also: {each.words}" for each in result.findings[1:]]
    elif result.verdict is TrainingVerdict.BITS:
        said.append(f"Equal to the last bit over {steps}.")
    elif result.verdict is TrainingVerdict.ROUNDING:
        in_fp64 = f", and by {judged} in fp64" if result.judged is not result.own else ""
        said.append(f"Equal within rounding over {steps}: differs by {own} as it is{in_fp64}.")
    elif result.verdict is TrainingVerdict.UNPROVED:
        said.append(f"Not proved: {result.why}")
    else:
        first = result.judged.first(TOLERANCE)
        where = "" if first is None else f", first {verdicts.name_step(first)}"
        what = "" if first is None else f" {verdicts.describe_step(first, TOLERANCE)}"
        said.append(f"Differs in fp64{where}.{what}")
        said.append(
            f"Cause: {result.cause.words}"
            if result.cause is not None
            else "No cause was found by trying."
        )
    said.append(
        f"Compared with one process that was given the batches of all {result.ranks} ranks "
        f"({batch} rows per step)."
    )
    return said


def as_json(command: StockCommand, result: StockResult, code: int) -> dict[str, Any]:
    """Return everything as plain values."""
    causes = [(each.name, each.words) for each in result.findings]
    if result.cause is not None:
        causes.append((result.cause.name, result.cause.words))
    return {
        "command": str(command),
        "verdict": result.verdict.name.lower(),
        "exit_code": code,
        "ranks": result.ranks,
        "steps": result.steps,
        "rows": list(result.rows),
        "largest_difference": finite(result.own.largest),
        "largest_difference_judged": finite(result.judged.largest),
        "causes": [{"name": name, "words": words} for name, words in causes],
        "words": sentences(result),
        "reference_losses": [finite(value) for value in result.losses[0]],
        "losses": [finite(value) for value in result.losses[1]],
        **machine_facts(),
    }


def _write_junit(
    path: Path, command: StockCommand, said: list[str], code: int, seconds: float
) -> None:
    """Write a JUnit file with one test case."""
    suite = ElementTree.Element(
        "testsuite", name="shardwise verify", tests="1", failures=str(int(code != 0))
    )
    case = ElementTree.SubElement(
        suite, "testcase", classname="shardwise.verify", name=str(command), time=f"{seconds:.3f}"
    )
    if code:
        failure = ElementTree.SubElement(case, "failure", message=said[0])
        failure.text = "\n".join(said)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
