"""Compares the peak memory that `shardwise plan` predicts with what real runs on this machine take.

    python benchmarks/plan.py                  # all models and placements
    python benchmarks/plan.py mlp gpt2         # some models, on one rank
    python benchmarks/plan.py --placements --only context
    python benchmarks/plan.py --placements     # placements only: ranks, recomputation, disks, saves
    python benchmarks/plan.py --docs           # and puts the tables into docs/plan_accuracy.md

Both count bytes of tensors. Predicted: the step is observed without memory in one process.
Measured: another process trains for two steps or four, and torch's profiler reports its tensors
(plan_measure.py). For the models on one rank both are forks of this process, which has imported the
libraries; placements are runs of `shardwise run`. With KEEP=DIR in the environment the records
stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import plan_docs
import plan_measure
import plan_models
from shardwise.layout.placement import Placement, Tier
from shardwise.tools.plan import observer
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.memory import Hardware, MemoryPlan, predict
from shardwise.tools.plan.observe import ObservedStep, Script, Way, observe_sizes
from shardwise.tools.plan.record import StepRecord

GOAL, LOW = 0.03, -0.02
"""A prediction is good within 3 %, and no more than 2 % too low."""

HARDWARE = Hardware(apart=False, shares=True)
"""Ranks that compute on the CPU of one host."""

TITLES = ("Peak memory of models, measured here", "Peak memory of placements, measured here")


@dataclass(frozen=True)
class Setup:
    """A placement to measure: model, number of ranks, flags, and whether each step saves."""

    model: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    saves: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        flags = " ".join(each.replace(str(tempfile.gettempdir()), "DIR") for each in self.flags)
        return f"-n {self.ranks} {flags}" + (", with a save" if self.saves else "")

    @property
    def way(self) -> Way:
        """The settings of the observation."""
        given = dict(zip(self.flags[::2], self.flags[1::2], strict=True))
        return Way(
            given.get("--activations", "kept"),
            context=int(given.get("--context", 1)),
            method=given.get("--context-method", ""),
        )


STEPS = 4
"""Steps of a placement: so many take each buffer of gradients in its turn."""

DISK = ("--offload-optimizer", f"nvme:{tempfile.gettempdir()}")
SETUPS = (
    *(Setup("mlp", 2, ("--zero", str(level))) for level in range(4)),
    Setup("gpt2", 2, ("--zero", "1")),
    Setup("gpt2", 2, ("--zero", "3")),
    Setup("gpt2", 1, ("--activations", "recomputed")),
    Setup("gpt2", 2, ("--zero", "2", "--activations", "recomputed")),
    Setup("mlp", 1, DISK),
    Setup("gpt2", 2, ("--zero", "2", *DISK)),
    Setup("gpt2", 1, (), saves=True),
    Setup("gpt2", 2, ("--zero", "3"), saves=True),
    Setup("llama", 2, ("--context", "2", "--context-method", "ulysses")),
    Setup("llama", 2, ("--context", "2", "--context-method", "gathered", "--zero", "3")),
)


def main() -> None:
    """Print both tables, and how many rows are within the goal."""
    options = _options()
    known = [each.__name__ for each in plan_models.MODELS]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    facts = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, fp32, MB, {day}"
    )
    made = []
    if not options.placements:
        made.append((TITLES[0], list(_shown(models_table(options.models or known)))))
    if options.placements or not options.models:
        setups = [each for each in SETUPS if options.only in each.name]
        made.append((TITLES[1], list(_shown(placements_table(setups)))))
    for title, lines in made:
        if options.docs:
            plan_docs.put(title, [f"`{_command()}`: {facts}.\n", *lines])


def _command() -> str:
    return shlex.join(["python", "benchmarks/plan.py", *sys.argv[1:]])


def _shown(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        print(line, flush=True)
        yield line


def models_table(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each model on one rank."""
    yield "| model | planned | measured | error | peak at |"
    yield "|---|--:|--:|--:|---|"
    plan_measure.warm_up(names)
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            found = compare(name, Path(os.environ.get("KEEP") or temporary))
            if isinstance(found, str):
                yield f"| {name} | {found} | | | |"
                continue
            plan, measured_bytes = found
            errors.append(plan.peak / measured_bytes - 1)
            yield (
                f"| {name} | {plan.peak / 1e6:.1f} | {measured_bytes / 1e6:.1f} "
                f"| {errors[-1]:+.1%} | {plan.where.split(' of ')[0]} |"
            )
    yield from _summary(errors, len(names))


def _summary(errors: Sequence[float], count: int) -> Iterator[str]:
    good = sum(LOW <= error <= GOAL for error in errors)
    yield f"\nOf the {count} predictions, {good} are within {LOW:.0%} to +{GOAL:.0%}."


def compare(name: str, folder: Path) -> tuple[MemoryPlan, int] | str:
    """Return the prediction for a model and the bytes that it takes, or why one of them failed."""
    record, log, measured_file = (folder / f"{name}.{end}" for end in ("json", "log", "measured"))
    _in_fork(
        lambda: observer.main(
            [str(record), "0", "1", "1", "", "", "", str(plan_measure.MODELS), name]
        ),
        log,
    )
    if not record.exists():
        return f"not observed: {log.read_text().strip().splitlines()[-1][-200:]}"
    _in_fork(lambda: plan_measure.measure(measured_file, name), log)
    found = Path(f"{measured_file}.0")
    if not found.exists():
        return f"not measured: {log.read_text().strip().splitlines()[-1][-200:]}"
    step = StepRecord.read(record)
    choice = Choice(row=Placement.zero(0), data=1, micro_batch=step.batch_size)
    return predict(step, choice, HARDWARE), sum(json.loads(found.read_text()).values())


def _in_fork(work: Callable[[], Any], log: Path) -> None:
    """Run `work` in a forked process, with its output in `log`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            work()
        except SystemExit:
            pass  # the measurement ends the script this way
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def placements_table(setups: Sequence[Setup]) -> Iterator[str]:
    """Yield a line per placement, with the bytes of the rank that has the most."""
    yield "| model | flags | planned | measured | error | of it shared |"
    yield "|---|---|--:|--:|--:|--:|"
    errors: list[float] = []
    steps: dict[tuple[str, Way], ObservedStep] = {}
    for setup in setups:
        key = setup.model, setup.way
        if key not in steps:
            script = Script((str(plan_measure.MODELS), setup.model))
            steps[key] = observe_sizes(script, setup.way)
        planned = plan_of(setup, steps[key]).peak
        total, shared = measured(setup)
        errors.append(planned / total - 1)
        yield (
            f"| {setup.model} | {setup.name} | {planned / 1e6:.1f} | {total / 1e6:.1f} "
            f"| {errors[-1]:+.1%} | {shared / 1e6:.1f} |"
        )
    yield from _summary(errors, len(setups))


def plan_of(setup: Setup, step: ObservedStep) -> MemoryPlan:
    """Return the plan of the first rank."""
    level = int(setup.flags[setup.flags.index("--zero") + 1]) if "--zero" in setup.flags else 0
    row = Placement.zero(level)
    if "--offload-optimizer" in setup.flags:
        row = row.resting(optimizer=Tier.parse(DISK[1]))
    context = setup.way.context
    share = step.large.total_batch * context // setup.ranks
    choice = Choice(row=row, data=setup.ranks, context=context, micro_batch=share)
    return predict(step.at(share), choice, HARDWARE)


def measured(setup: Setup) -> tuple[int, int]:
    """Return the bytes of the rank that has the most, and how many of them are shared."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak"
        words = [sys.executable, "-m", "shardwise", "run", "-n", str(setup.ranks), "--quiet"]
        words += [*setup.flags, plan_measure.__file__, str(file), setup.model]
        words += ["--steps", str(STEPS)]
        words += ["--save", str(Path(folder) / "checkpoints")] if setup.saves else []
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(setup.ranks)]
    most = max(found, key=lambda each: each["private"] + each["shared"])
    return most["private"] + most["shared"], most["shared"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="some models of plan_models.py, on one rank")
    parser.add_argument("--placements", action="store_true", help="the second table only")
    parser.add_argument("--only", default="", metavar="FLAG", help="placements with this flag only")
    parser.add_argument("--docs", action="store_true", help="write docs/plan_accuracy.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
