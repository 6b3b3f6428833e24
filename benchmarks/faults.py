"""Whether training survives: kill -9 of a random rank or of the launcher, at random moments.

    python benchmarks/faults.py [--count 100] [--ranks 2] [--each 5] [--folder DIR] [--json FILE]

A small training saves every second step. It is killed `--each` times on its way, while it starts,
trains or saves; a killed rank is `shardwise run --restarts`' to start again, a killed launcher
ours, by the same command. What the training comes to (parameters, optimizer, schedule, data) must
have the bits of one that nobody disturbed, in every row. Ends with 1 where it has not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

import machine
from shardwise.checkpoint.tools import OpenedCheckpoint

WORKER = Path(__file__).with_name("faults_worker.py")
LIMIT = 600.0
"""Seconds in which something must happen."""

RESTARTS = 1000
"""So many that a run is only given up where it is stuck."""


@dataclass
class Counts:
    """What was done, and what came of it."""

    faults: int = 0
    of: Counter[str] = field(default_factory=Counter)
    """By who was killed, and when."""
    half_written: int = 0
    """Faults that left an unfinished checkpoint behind."""
    steps_lost: int = 0
    given_up: int = 0
    """Restarts that the launcher refused, since three faults had hit the same step."""
    runs: int = 0
    runs_that_differ: int = 0
    broken: int = 0
    """Checkpoints that were complete by their name, and not whole."""


def ranks_of(launcher: int) -> list[int]:
    """The processes below `launcher` that are ranks."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            if b"\0SHARDWISE_LAUNCH_RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                found.append(int(child))
        except OSError:  # it has ended
            continue
    return found


class Run:
    """One training, started as often as its launcher is killed."""

    def __init__(self, row: int, options: argparse.Namespace, folder: Path) -> None:
        self.folder = folder / "checkpoints"
        self.hash = ""
        self.lost = 0
        self._step = 0
        self._moved = threading.Condition()
        self._marks = {"start": 0, "step": 0}
        self._words = [sys.executable, "-m", "shardwise", "run", "-n", str(options.ranks)]
        self._words += ["--zero", str(row), "--restarts", str(RESTARTS), str(WORKER)]
        self._words += [str(self.folder)]
        for name in ("steps", "width", "pause"):
            self._words += [f"--{name}", str(getattr(options, name))]
        self._log = (folder / "log").open("a")
        self.start()

    def start(self) -> None:
        """Start the launcher."""
        self.process = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = re.search(r"(start|step|hash) (\w+)$", line.rstrip())
            if told is not None:
                self._take(told[1], told[2])

    def _take(self, what: str, value: str) -> None:
        with self._moved:
            if what == "hash":
                self.hash = value
            else:
                if what == "start":
                    self.lost += max(0, self._step - int(value))
                self._step = int(value)
                self._marks[what] += 1
            self._moved.notify_all()

    def wait_for(self, what: str) -> None:
        """Return when the next such line has come, or the launcher has ended."""
        with self._moved:
            seen, until = self._marks[what], time.monotonic() + LIMIT
            while self._marks[what] == seen and self.process.poll() is None:
                self._moved.wait(0.05)
                assert time.monotonic() < until, f"nothing has happened: {self._words}"

    def wait_for_save(self) -> None:
        """Return when a checkpoint is being written, or the launcher has ended."""
        until = time.monotonic() + LIMIT
        while not self.unfinished() and self.process.poll() is None:
            time.sleep(0.0005)
            assert time.monotonic() < until, f"nothing was saved: {self._words}"

    def goes_on(self) -> bool:
        """Whether there is still something to be killed."""
        return not self.hash and self.process.poll() is None

    def unfinished(self) -> bool:
        """Whether there is a checkpoint without its name."""
        return any(self.folder.glob(".step-*.partial"))

    def ranks(self) -> list[int]:
        """The processes that are ranks."""
        return ranks_of(self.process.pid)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(LIMIT)
        self._reader.join()
        return code

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.end()
        self._log.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Do it, and print the counts."""
    options = _parser().parse_args(arguments)
    console, facts = Console(), machine.describe()
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    dice, counts = random.Random(options.seed), Counts()
    wanted: dict[int, str] = {}
    began = time.monotonic()
    while counts.faults < options.count:
        row = dice.choice(options.rows)
        if row not in wanted:
            wanted[row] = _train(row, options, None, 0, counts)
        left = min(options.each, options.count - counts.faults)
        reached = _train(row, options, dice, left, counts)
        counts.runs += 1
        counts.runs_that_differ += reached != wanted[row]
        console.print(
            f"{counts.faults:4} faults, {counts.runs} runs, {counts.runs_that_differ} differ "
            f"({time.monotonic() - began:.0f} s)",
            highlight=False,
        )
    for line in _lines(counts):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        told = {"machine": facts} | vars(counts)
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if counts.runs_that_differ or counts.broken else 0


def _train(
    row: int,
    options: argparse.Namespace,
    dice: random.Random | None,
    faults: int,
    counts: Counts,
) -> str:
    """Train once, with `faults` on the way; the hash of what it came to."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="faults-") as name:
        run = Run(row, options, Path(name))
        try:
            while dice is not None and faults and run.goes_on():
                faults -= _strike(run, dice, counts)
            while (code := run.end()) != 0:
                counts.given_up += 1
                assert "failures in a row" in Path(name, "log").read_text(), f"it ended with {code}"
                run.start()
            counts.steps_lost += run.lost
            for path in run.folder.glob("step-*"):
                with OpenedCheckpoint(path) as opened:
                    counts.broken += not all(good for _, good in opened.checked())
            return run.hash
        finally:
            run.close()


def _strike(run: Run, dice: random.Random, counts: Counts) -> bool:
    """Kill something at some moment; whether it was there to be killed."""
    moment = dice.choices(["starting", "training", "saving"], [1, 2, 2])[0]
    if moment == "starting":
        time.sleep(dice.uniform(0, 4))
    elif moment == "training":
        run.wait_for("step")
        time.sleep(dice.uniform(0, 0.2))
    else:
        run.wait_for("step")
        run.wait_for_save()
        time.sleep(dice.choice([0, dice.uniform(0, 0.03)]))
    who = dice.choices(["a rank", "the launcher"], [3, 1])[0]
    if not _kill(run, who, dice):
        return False
    counts.faults += 1
    counts.of[f"{who}, {moment}"] += 1
    counts.half_written += run.unfinished()
    if who == "the launcher":
        run.end()
        run.start()
    return True


def _kill(run: Run, who: str, dice: random.Random) -> bool:
    ranks = run.ranks() if run.goes_on() else []
    if not ranks:
        return False
    os.kill(dice.choice(ranks) if who == "a rank" else run.process.pid, signal.SIGKILL)
    if who == "the launcher":
        for rank in ranks:  # its warden ends them; the next start is theirs to wait for
            _wait_for_end(rank)
    return True


def _wait_for_end(pid: int) -> None:
    until = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
        assert time.monotonic() < until, f"process {pid} has outlived its launcher"


def _lines(counts: Counts) -> list[str]:
    of = ", ".join(f"{count} {what}" for what, count in sorted(counts.of.items()))
    return [
        f"{counts.faults} faults: {of}",
        f"{counts.half_written} left an unfinished checkpoint behind; {counts.broken} checkpoints "
        "were complete by name and not whole",
        f"{counts.steps_lost} steps were made again; {counts.given_up} times the launcher gave up "
        "at a step that was hit three times in a row, and was started once more",
        f"{counts.runs} runs, of which {counts.runs_that_differ} came to other bits than one that "
        "nobody disturbed",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, metavar="N", help="faults in all")
    parser.add_argument("--each", type=int, default=5, metavar="N", help="faults in one run")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--rows", type=_rows, default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="of one run")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="of each layer")
    parser.add_argument("--pause", type=float, default=0.02, metavar="S", help="seconds, each step")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts")
    return parser


def _rows(text: str) -> list[int]:
    return [int(row) for row in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
