"""Prints the result of `shardwise verify --stock`, and writes it to files."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwise.errors import LaunchError
from shardwise.messages.printable import printable
from shardwise.tools.report.output import exit_on_sigterm, finite, is_stdout, machine_facts
from shardwise.tools.report.page import write_page
from shardwise.tools.verify import verdicts
from shardwise.tools.verify.comparing import largest_by_step
from shardwise.tools.verify.page import rows_of
from shardwise.tools.verify.report import STYLES
from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import stock_flow, stock_resume
from shardwise.tools.verify.stock.stock_flow import StockResult
from shardwise.tools.verify.stock.stock_resume import ResumeResult
from shardwise.tools.verify.stock.stock_runs import StockCommand, StockRuns
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict

FAILED = 1
LINES_OF_OUTPUT = 60


@dataclass(frozen=True, kw_only=True)
class StockRequest:
    """The arguments of `shardwise verify --stock`.

    Attributes:
        command: The command that starts the ranks.
        steps: Largest number of steps per run.
        out: Folder for the page, plot, JSON and logs.
        accepts_rounding: Whether the exit code is 0 for "equal within rounding".
        finds_causes: Whether to search for the cause of a difference with further runs.
        time_limit: Seconds without progress after which a run is stopped.
        resume_at: Step after which to stop the ranks, or None to compare with one process.
        again: The command that resumes the stopped ranks.
    """

    command: StockCommand
    steps: int
    out: Path
    accepts_rounding: bool
    finds_causes: bool
    time_limit: float
    resume_at: int | None
    again: StockCommand

    @property
    def reference(self) -> str:
        """The name of the run with which the ranks are compared."""
        if self.resume_at is not None:
            return "the same command, not stopped"
        return f"one process {shlex.join(self.command.alone)}".strip()


def verify(request: StockRequest, *, json_file: Path | None, junit: Path | None) -> int:
    """Verify a stock script, print the result, and return the exit code."""
    for path in (json_file, junit):
        if path is not None and not path.parent.is_dir() and not is_stdout(path):
            raise LaunchError(f"{path} cannot be written: there is no folder {path.parent}.")
    console = Console(highlight=False, markup=False, stderr=is_stdout(json_file))
    bar_console = Console(highlight=False, markup=False, stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=bar_console,
        transient=True,
        disable=not bar_console.is_terminal,
    )
    logs = request.out / "verify-logs"
    logs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    runs = StockRuns(request.command, request.steps, logs, progress, request.time_limit)
    try:
        with exit_on_sigterm(), runs, progress:
            result: StockResult
            if request.resume_at is not None:
                result = stock_resume.verify(runs, request.resume_at, request.again)
            else:
                result = stock_flow.verify(runs, finds_causes=request.finds_causes)
    except (RunFailed, LaunchError) as error:
        output = error.output if isinstance(error, RunFailed) else ""
        for line in output.strip().splitlines()[-LINES_OF_OUTPUT:]:
            console.print(printable(line), style="dim", soft_wrap=True)
        said = [f"{error}", f"Nothing is proved. All output is in {logs}."]
        for sentence in said:
            console.print(printable(f"shardwise: {sentence}"), style="red", soft_wrap=True)
        if junit is not None:
            seconds = time.monotonic() - begun
            _write_junit(junit, request, said, FAILED, seconds, kind="error")
        return FAILED
    said = sentences(result, request.command.alone)
    for number, sentence in enumerate(said):
        style = STYLES[result.verdict] if number == 0 else None
        console.print(printable(sentence), style=style, soft_wrap=True)
    accepted = request.accepts_rounding and result.verdict is TrainingVerdict.ROUNDING
    code = 0 if accepted else result.verdict.value
    text = json.dumps(as_json(request, result, code), indent=2, allow_nan=False)
    (request.out / "verify.json").write_text(text + "\n")
    _write_page(request, result, said)
    if is_stdout(json_file):
        print(text)
    elif json_file is not None:
        json_file.write_text(text + "\n")
    if junit is not None:
        _write_junit(junit, request, said, code, time.monotonic() - begun, kind="failure")
    console.print(
        f"report: {request.out / 'verify.html'} (PNG and JSON in the same folder)", soft_wrap=True
    )
    return code


def sentences(result: StockResult | ResumeResult, alone: Sequence[str] = ()) -> list[str]:
    """Return a description of a result in sentences, starting with the verdict.

    Args:
        result: The result.
        alone: The `--total-batch` command that started the single process, if there is one.
    """
    if isinstance(result, ResumeResult):
        return _about_resume(result)
    steps = f"{result.steps} step{'s' * (result.steps != 1)}"
    own = verdicts.format_difference(result.own.largest)
    judged = verdicts.format_difference(result.judged.largest)
    said = []
    if result.findings:
        said.append(f"Differs from one process: {result.findings[0].words}")
        said += [f"Also: {each.words}" for each in result.findings[1:]]
        if result.why:
            said.append(f"Nothing else is proved: {result.why}")
    elif result.verdict is TrainingVerdict.BITS:
        said.append(f"Equal to the last bit over {steps}.")
    elif result.verdict is TrainingVerdict.ROUNDING:
        in_fp64 = f", and by {judged} in fp64" if result.wide is not None else ""
        said.append(f"Equal within rounding over {steps}: differs by {own} as it is{in_fp64}.")
    elif result.verdict is TrainingVerdict.UNPROVED:
        said.append(f"Not proved: {result.why}")
        if result.ranks == 1 or not result.losses[0]:
            return said  # there was no other process to compare with
    else:
        said += _about_difference(result)
    rows = sorted(set(result.rows))
    per_step = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else "".join(map(str, rows))
    batch = f" ({per_step} rows per step)" if rows else ""
    how = (
        f"was started with {shlex.join(alone)}"
        if alone
        else f"was given the batches of all {result.ranks} ranks"
    )
    said.append(f"Compared with one process that {how}{batch}.")
    return said


def _about_difference(result: StockResult) -> list[str]:
    """Return the cause, and then the differences that show it."""
    first = result.judged.first(TOLERANCE)
    if result.cause is not None:
        words = result.cause.words
    elif not result.finds_causes:
        words = "the cause was not looked for (--no-causes)."
    elif first is not None and first.tensors:
        words = "no known cause explains it. Look for the mistake at the first tensor that differs."
    else:
        words = "no known cause explains it."
    said = [f"Differs from one process: {words}"]
    if first is not None:
        precision = "In fp64, the" if result.wide is not None else "The"
        what = verdicts.describe_step(first, TOLERANCE)
        said.append(f"{precision} runs first differ {verdicts.name_step(first)}. {what}")
    if not result.judged.same_counts:
        one, other = next(pair for pair in result.judged.counts.values() if pair[0] != pair[1])
        said.append(f"The ranks make {other} steps, and one process makes {one}.")
    return said


def _about_resume(result: ResumeResult) -> list[str]:
    steps = f"{result.steps} step{'s' * (result.steps != 1)}"
    said = []
    if result.findings:
        said.append(f"Does not resume: {result.findings[0].words}")
        said += [f"Also: {each.words}" for each in result.findings[1:]]
    elif result.verdict is TrainingVerdict.BITS:
        said.append(f"Resumes to the last bit, over {steps} after the second start.")
    else:
        said.append(f"Not proved: {result.why}")
    if result.resumed_from is not None:
        said.append(
            f"The ranks got SIGTERM after {result.stopped_at} steps, and the second start went on "
            f"after step {result.resumed_from} of the run that was not stopped."
        )
    return said


def as_json(request: StockRequest, result: StockResult, code: int) -> dict[str, Any]:
    """Return the request and the result as values that JSON can represent."""
    causes = [(each.name, each.words) for each in result.findings]
    if result.cause is not None:
        causes.append((result.cause.name, result.cause.words))
    resumed = (
        {"stopped_at": result.stopped_at, "resumed_from": result.resumed_from}
        if isinstance(result, ResumeResult)
        else {}
    )
    return {
        "command": str(request.command),
        "reference": request.reference,
        "verdict": result.verdict.name.lower(),
        "exit_code": code,
        "ranks": result.ranks,
        "steps": result.steps,
        "rows": list(result.rows),
        "largest_difference": finite(result.own.largest),
        "largest_difference_judged": finite(result.judged.largest),
        "difference_by_step": [finite(value) for _, value in largest_by_step(result.own)],
        "causes": [{"name": name, "words": words} for name, words in causes],
        "words": sentences(result, request.command.alone),
        "reference_losses": [finite(value) for value in result.losses[0]],
        "losses": [finite(value) for value in result.losses[1]],
        **resumed,
        **machine_facts(),
    }


def _write_page(request: StockRequest, result: StockResult, said: list[str]) -> None:
    """Write verify.html and verify.png."""
    from shardwise.tools.verify import plots  # imports matplotlib, which takes half a second

    drawn = plots.DrawnResult(
        label=f"{result.ranks} ranks",
        verdict=result.verdict,
        losses=result.losses,
        own=result.own,
        wide=result.wide,
    )
    write_page(
        request.out / "verify.html",
        "shardwise.tools.verify",
        command=str(request.command),
        verdict=result.verdict,
        reference=request.reference,
        steps=request.steps,
        is_stock=True,
        machine=machine_facts(),
        picture=plots.draw(str(request.command), [drawn], request.out),
        tolerance=verdicts.format_difference(TOLERANCE),
        results=[
            {
                "placement": drawn.label,
                "verdict": result.verdict,
                "sentences": said,
                "rows": rows_of(result.judged),
                "in_fp64": result.wide is not None,
            }
        ],
    )


def _write_junit(
    path: Path, request: StockRequest, said: list[str], code: int, seconds: float, *, kind: str
) -> None:
    """Write a JUnit file with one test case. `kind` is "failure", or "error" if a run failed."""
    took = f"{seconds:.3f}"
    counts = {name: str(int(code != 0 and kind == name[:-1])) for name in ("failures", "errors")}
    totals = {"tests": "1", "time": took, **counts}
    suites = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(
        suites, "testsuite", {"name": "shardwise verify", "skipped": "0", **totals}
    )
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname="shardwise.verify",
        name=printable(str(request.command)),
        time=took,
    )
    if code:
        found = ElementTree.SubElement(case, kind, message=printable(said[0]), type=kind)
        found.text = "\n".join(map(printable, said))
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
