"""Implements `shardwise verify`: launches the runs, shows progress and prints the verdicts."""

from __future__ import annotations

import math
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwise.errors import LaunchError
from shardwise.messages.printable import printable
from shardwise.tools.report.output import check_can_draw, exit_on_sigterm, is_stdout
from shardwise.tools.verify import page, runs, verdicts
from shardwise.tools.verify.flow import Verification
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.verify.report import STYLES, VerifyReport
from shardwise.tools.verify.request import VerifyRequest
from shardwise.tools.verify.runs import RECORDS, Run, RunFailed, warm_ranks
from shardwise.tools.verify.verdicts import Result
from shardwise.tools.warm.warm_ranks import WarmRanks

FAILED = 1
LOGS = "verify-logs"
"""Name of the folder for the output of each run, inside the folder of the report."""

PROGRESS_INTERVAL = 30.0
"""Seconds between two progress lines of the same run if the output is not a terminal."""

LINES_OF_OUTPUT = 60
"""Number of output lines to show of a run that failed, enough for its traceback."""


class ProgressDisplay:
    """Shows progress on standard error.

    On a terminal it updates a single line. Otherwise it prints a line at the start of each run, and
    another line every `PROGRESS_INTERVAL` seconds.
    """

    def __init__(self) -> None:
        # Standard output is reserved for the verdicts or the JSON.
        self._console = Console(highlight=False, markup=False, stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, what="")
        self._printed_at = -math.inf

    def show(self, number: int, words: str, steps: int, most: int) -> None:
        """Show that run `number`, described by `words`, has completed `steps` of `most` steps."""
        far = printable(f"run {number} · {words} · step {steps} of {most}")
        self._bar.update(self._task, what=far)
        if self._bar.disable and (
            not steps or time.monotonic() - self._printed_at > PROGRESS_INTERVAL
        ):
            self._printed_at = time.monotonic()
            line = far if steps else printable(f"run {number} · {words}")
            self._console.print(line, soft_wrap=True)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


@dataclass
class RunMaker:
    """Executes runs on ranks forked from `warm` processes, with one log per run in `folder`."""

    folder: Path
    progress: ProgressDisplay
    warm: WarmRanks
    names: list[str] = field(default_factory=list)

    def __call__(self, run: Run, words: str) -> RecordedTraining:
        """Execute one run, described by `words`, and return its record.

        Raises RunFailed if the run exits with an error.
        """
        self.names.append(words)
        # Logs have the same numbers as the runs in the progress lines.
        number = len(self.names)
        log = self.folder / f"{number:02d}.txt"
        self.progress.show(number, words, 0, run.steps)
        seen = 0

        def show(steps: int) -> None:
            nonlocal seen
            if steps > seen:
                seen = steps
                self.progress.show(number, words, steps, run.steps)

        return runs.make(run, words, log, show, self.warm)


def verify(plan: VerifyRequest, json_file: Path | None) -> int:
    """Verify the placements of `plan`, print the verdicts and write the report.

    Returns the exit code of the worst verdict, or 1 if a run failed. Raises LaunchError if the
    script cannot be verified or a package for the plots is missing.
    """
    check_can_draw("shardwise verify")  # before the runs, which take minutes
    to_stdout = is_stdout(json_file)
    if json_file is not None and not json_file.parent.is_dir():
        raise LaunchError(
            f"--json {json_file} cannot be written: there is no folder {json_file.parent}."
        )
    console = Console(highlight=False, markup=False, stderr=to_stdout)
    results: list[Result] = []
    try:
        with (
            exit_on_sigterm(),
            warm_ranks(plan.script, plan.max_size) as warm,
            ProgressDisplay() as progress,
        ):
            verification = Verification(plan, RunMaker(_log_folder(plan.out), progress, warm))
            # Check the reference first, to fail before running any placement.
            verification.check()
            for placement in plan.placements:
                result = verification.judge(placement)
                # Print each verdict immediately, because a placement may take minutes.
                results.append(result)
                console.print(f"{result.placement}", style="bold", soft_wrap=True)
                for number, sentence in enumerate(verdicts.sentences(result)):
                    style = STYLES[result.verdict] if number == 0 else None
                    console.print(f"  {printable(sentence)}", style=style, soft_wrap=True)
    except RunFailed as error:
        _print_failure(error, console)
        return FAILED
    report = VerifyReport(plan=plan, results=results)
    page.write(report, plan.out, json_file)
    console.print(
        f"report: {plan.out / 'verify.html'} (PNG and JSON in the same folder)", soft_wrap=True
    )
    return report.exit_code


def _log_folder(out: Path) -> Path:
    """Create the log folder in `out`, and remove the files of earlier verifications."""
    # Remove only files with known names, because `--out` may contain the user's own files.
    folder = out / LOGS
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_file() and re.fullmatch(r"\d{2,}\.txt", path.name):
            path.unlink()
        elif path.is_dir() and path.name.startswith(RECORDS):
            shutil.rmtree(path, ignore_errors=True)
    return folder


def _print_failure(error: RunFailed, console: Console) -> None:
    """Print the last output lines of the failed run, and the error."""
    for line in error.output.strip().splitlines()[-LINES_OF_OUTPUT:]:
        console.print(printable(line), style="dim", soft_wrap=True)
    console.print(
        f"shardwise: {printable(str(error))}\nNothing is proved: fix the script or choose "
        "another placement.",
        style="red",
        soft_wrap=True,
    )
