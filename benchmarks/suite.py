"""Runs tests within a budget of time, and writes how many passed beside the machine and the date.

    python benchmarks/suite.py --json FILE [--budget S] [--sanitizer] -- tests/gpu -k two_ranks

What stands after `--` goes to pytest. With --sanitizer torch's CUDA sanitizer follows every kernel
(TORCH_CUDA_SANITIZER=1) and raises where two streams touch a tensor without being ordered. When the
budget ends, pytest is asked to stop and tells of what it has run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import machine

ROOT = Path(__file__).parents[1]
GRACE = 20.0
"""Seconds that pytest has to write its report when it is asked to stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print what came of them; 1 where one failed, or none was run."""
    options = _parser().parse_args(arguments)
    facts = machine.describe()
    for name, value in facts.items():
        print(f"{name:>9}  {value}", flush=True)
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        report = Path(folder) / "report.xml"
        stopped, seconds = _run(options, report)
        figures: dict[str, Any] = dict.fromkeys(COUNTED, 0) | {"named": []}
        if report.exists():
            figures = read(report, stopped=stopped)
    figures |= {"stopped_by_the_budget": stopped, "seconds": round(seconds, 1)}
    figures |= {"sanitizer": options.sanitizer, "pytest": options.tests}
    machine.write_json(options.json, {"machine": facts, "tests": figures})
    print(f"{figures['passed']} passed, {figures['failed']} failed, {figures['skipped']} skipped")
    for named in figures["named"]:
        print(f"{named['test']}: {named['why']}")
    if stopped:
        print(f"the budget of {options.budget:.0f} s has ended: other tests were left out")
    return 1 if figures["failed"] or not figures["passed"] else 0


COUNTED = ("passed", "failed", "skipped")


def read(report: Path, *, stopped: bool = False) -> dict[str, Any]:
    """What pytest's report (JUnit's format) counts; of those that failed their name and why, of the
    skipped ones each reason once. Of a run that was `stopped` the last is the one that was not
    over, which the report shows as if it had passed."""
    counts = dict.fromkeys(COUNTED, 0)
    named: list[dict[str, str]] = []
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if stopped and cases and len(cases[-1]) == 0:
        del cases[-1]
    for case in cases:
        wrong = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        kind = "failed" if wrong is not None else "skipped" if skipped is not None else "passed"
        counts[kind] += 1
        if wrong is not None:
            test = f"{case.get('classname')}::{case.get('name')}"
            named.append({"test": test, "why": _why(wrong)})
        elif skipped is not None and not any(n["why"] == _why(skipped) for n in named):
            named.append({"test": "skipped", "why": _why(skipped)})
    return {**counts, "named": named}


def _why(element: ElementTree.Element) -> str:
    """The last line of what a rank raised, where the message ends with it."""
    lines = (element.get("message") or element.text or "").strip().splitlines() or [""]
    return lines[-1][:300]


def _run(options: argparse.Namespace, report: Path) -> tuple[bool, float]:
    """Whether it had to be stopped, and the seconds that it took."""
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options.tests]
    # Ranks are forked from a process that has imported torch. Whether there is a GPU must be asked
    # of the driver's library there: CUDA itself, once asked, does not outlive a fork.
    environment = dict(os.environ) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if options.sanitizer:
        environment["TORCH_CUDA_SANITIZER"] = "1"
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        process.wait(options.budget)
        return False, time.monotonic() - begun
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return True, time.monotonic() - begun


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds, for all tests")
    parser.add_argument("--sanitizer", action="store_true", help="torch's CUDA sanitizer")
    parser.add_argument("tests", nargs="+", metavar="ARGUMENT", help="pytest's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
