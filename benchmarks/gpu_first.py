"""Measures all that one GPU can prove, in one command: `scripts/gpu first`.

    PYTHON=python3 OUT=folder scripts/gpu first           # on a machine with a GPU
    SCALE=tiny OUT=folder scripts/gpu first               # the same code at sizes that say nothing
    python benchmarks/gpu_first.py --docs FOLDER/first.json     # put the figures into docs/speed.md

The steps run in order of value, each in a separate process group. A step may use the seconds of
its share and those that earlier steps left; then it is killed. FOLDER/first.json is written after
each step, so a run that is killed loses at most the step in progress. A step that fails is one
line of the table, and the next one runs.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crew
import gpu_first_report as report
import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"

BUDGET = 510.0
"""Seconds for all steps: a command on a lent machine often ends after ten minutes."""

REPORTING = 5.0
"""Seconds that are kept for the table."""


STEPS = {
    "right": 60.0,
    "fast": 170.0,
    "uncompiled": 60.0,
    "two-ranks": 40.0,
    "offload": 80.0,
    "plan": 30.0,
    "save": 30.0,
    "largest": 35.0,  # and all time that is left
}
"""The functions of gpu_first_steps.py in order of value, and their shares of BUDGET in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; 0 if each of them measured something and nothing failed."""
    options = _parser().parse_args(arguments)
    if options.docs is not None:
        report.publish(options.docs, RESULTS)
        return 0
    begun = time.monotonic()
    measured: dict[str, Any] = {}
    if options.plan is not None:  # needs no GPU
        known = json.loads(options.plan.read_text())
        facts, measured, options.steps = known["machine"], known["steps"], ["plan"]
    else:
        facts = machine.describe() | {"device": "cpu"}
        try:
            facts |= machine.describe_device(crew.PYTHON)
        except RuntimeError as error:  # no GPU: at tiny sizes the CPU takes its place
            if options.scale != "tiny":
                print(f"gpu_first: {error}. SCALE=tiny runs the steps on the CPU.")
                return 2
    options.out = options.out.resolve()  # each rank has its own working directory
    figures: dict[str, Any] = {"machine": facts, "scale": options.scale, "steps": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in STEPS if name in options.steps]
    # On a cold machine the first import of torch takes a while: no step pays for it alone.
    until = time.monotonic()
    left = begun + options.budget - REPORTING - until
    scale = left / sum(STEPS[name] for name in chosen)
    for name in chosen:
        until += STEPS[name] * scale
        if name == chosen[-1]:
            until = begun + options.budget - REPORTING
        # The shares are cumulative, so a step that ends early leaves its time to the next ones.
        seconds = until - time.monotonic()
        print(f"== {name}: {seconds:.0f} s at most", flush=True)
        figures["steps"][name] = _run(name, seconds, options, facts, measured | figures["steps"])
        machine.write_json(options.out / "first.json", figures)
        figures["seconds"] = round(time.monotonic() - begun, 1)
    lines = report.lines(figures)
    (options.out / "first.txt").write_text("\n".join(lines) + "\n")
    machine.write_json(options.out / "first.json", figures)
    print("\n".join(lines))
    return 1 if report.failures(figures) else 0


def _run(
    name: str,
    seconds: float,
    options: argparse.Namespace,
    facts: dict[str, str],
    measured: dict[str, Any],
) -> dict[str, Any]:
    """Run one step for `seconds` at most; return its rows, and how it ended.

    `measured` are the records of earlier steps.
    """
    record: dict[str, Any] = {"rows": {}, "error": "", "cut": False}
    begun = time.monotonic()
    # The disk of OUT: /tmp may be in memory, which the nvme tier refuses.
    # A rank that is being killed may still write: a folder that stays is no failure.
    with tempfile.TemporaryDirectory(
        dir=options.out, prefix=".first-", ignore_cleanup_errors=True
    ) as folder:
        rows, words = Path(folder) / "rows", Path(folder) / "stderr"
        rows.touch()
        job = {
            "step": name,
            "scale": options.scale,
            "device": "cpu" if facts["device"] == "cpu" else "cuda",
            "name": facts["device"],
            "folder": folder,
            "seconds": seconds,
            "measured": measured,
            "contenders": options.contenders,
        }
        (Path(folder) / "job.json").write_text(json.dumps(job))
        # The step imports the tests on a GPU from the root of the repository.
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent)])
        with words.open("wb") as stderr:
            # No pipe: the compiler's workers may hold its other end after the step has ended.
            process = subprocess.Popen(
                [*crew.PYTHON, str(HERE / "gpu_first_steps.py"), folder],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | {"TMPDIR": folder, "PYTHONPATH": path},
                start_new_session=True,
            )
        try:
            process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            record["cut"] = True
        finally:
            # Ranks are children of the step: its whole group is killed, also after Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in rows.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # cut off while it was written
                row = json.loads(line)
                record["rows"][row.pop("key")] = row
        said = words.read_text(errors="replace")
    if process.returncode:
        if not record["cut"]:
            why = report.exception_in(said) or f"it ended with {process.returncode}"
            record["error"] = why[:300]
        print("\n".join(said.splitlines()[-15:]), file=sys.stderr)
    return record | {"seconds": round(time.monotonic() - begun, 1)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = list(STEPS)
    add("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    add("--budget", type=float, default=BUDGET, metavar="S", help=f"seconds ({BUDGET:.0f})")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--steps", nargs="+", choices=names, default=names, metavar="STEP", help="some steps only")
    add("--contenders", nargs="+", default=[], metavar="KEY", help="in races these alone")
    add("--plan", type=Path, metavar="FILE", help="plan again what this first.json measured")
    add("--docs", type=Path, metavar="FILE", help="publish this first.json instead of measuring")
    return parser


if __name__ == "__main__":
    sys.exit(main())
