"""The largest GPT that trains on one GPU, and its tokens/s: plain PyTorch, and states elsewhere.

    python benchmarks/largest.py --folder DIR [--width 4096] [--batch 4] [--first 1] [--most 200] \\
        [--contenders "plain,FSDP2 + cpu,ZERO_3 + cpu,ZERO_3 + nvme"] [--timeout S] [--budget S] \\
        [--json FILE]

Each size trains in a process of its own, so that running out of memory harms nobody else. From
--first on, layers are doubled until that fails; then the gap is halved. Each contender recomputes
its blocks in backward and computes in bf16 by autocast, with fp32 parameters under AdamW: the same
16 bytes of a parameter, somewhere. The last column is the speed of all at the largest size that all
of them train. Contenders share the seconds of --budget: one that has used up its part stops, and
its size is marked as "at least".
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import crew
import figure
import machine
from contenders import Contender
from crew import Crew, CrewFailed, DoesNotFit, NotInstalled, TooLate
from figures import step_times
from workloads import Gpt, Setting

WARM_UP, TIMED = 2, 3

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("torch_peers:plain", {"recomputed": True}),
    "FSDP2 + cpu": (
        "torch_peers:fsdp2",
        {"reshard": True, "offload": True, "recomputed": True, "on_meta": True},
    ),
    "ZERO_3 + cpu": ("ours:build", {"offload_params": "cpu", "offload_optimizer": "cpu"}),
    "ZERO_3 + nvme": (
        "ours:build",
        {"offload_params": "nvme:{folder}", "offload_optimizer": "nvme:{folder}"},
    ),
}
"""Plain PyTorch, FSDP2 with its CPU offload, and the engine with all states in one place."""


@dataclass(frozen=True)
class Run:
    """The result of one size: tokens/s and the peak of the device in bytes."""

    tokens: float
    peak: int


@dataclass
class Tried:
    """A contender's sizes in layers: the results of those that it trained, and why others failed.
    `cut`: time was over before the largest was known."""

    runs: dict[int, Run] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    cut: bool = False


Attempt = Callable[[int], Run | None]
"""Trains a number of layers; None if they do not fit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search every contender's largest size, and print one table."""
    options = _parser().parse_args(arguments)
    try:
        device = machine.describe_device(crew.PYTHON)
    except RuntimeError as error:
        print(f"benchmarks/largest.py: {error}")
        return 2
    facts = figure.begin(**device)
    tried = {name: Tried() for name in options.contenders}
    until = time.monotonic() + options.budget
    for number, (name, found) in enumerate(tried.items()):
        # A last part is for the speeds at the common size.
        part = (until - time.monotonic()) / (len(tried) - number + 1)
        limit = time.monotonic() + part
        largest(_attempts(options, name, found, limit), options.most, options.first)
    common = min((max(found.runs, default=0) for found in tried.values()), default=0)
    for name, found in tried.items():
        if common and common not in found.runs:
            _attempts(options, name, found, until)(common)
    figure.show("", *_table(options, tried, common))
    sizes = {name: asdict(found) for name, found in tried.items()}
    figure.keep(options, facts, workload=asdict(_workload(options, 1)), tried=sizes)
    return 0 if all(found.runs for found in tried.values()) else 1


def largest(attempt: Attempt, most: int, first: int = 1) -> int:
    """Return the largest number up to `most` at which `attempt` gives a run; 0 if there is none.

    The first trial is `first`, which should fit.
    """
    fits, fails = 0, most + 1
    trial = min(first, most)
    while fits + 1 < fails:
        if attempt(trial) is not None:
            fits = trial
            trial = min(2 * trial, most) if fails > most else (fits + fails) // 2
        else:
            fails = trial
            trial = (fits + fails) // 2
    return fits


def _attempts(options: argparse.Namespace, name: str, found: Tried, until: float) -> Attempt:
    """Return the trials of one contender until that moment on the monotonic clock.

    Later ones count as failed, and leave their mark.
    """

    def attempt(layers: int) -> Run | None:
        left = min(options.timeout, until - time.monotonic())
        why = "no time is left"
        if left > 0:
            run, why = _trained(options, name, layers, left)
            if run is not None:
                figure.show(f"{name}, {layers} layers: {run.tokens:,.0f} tokens/s")
                found.runs[layers] = run
                return run
        found.cut |= time.monotonic() >= until
        found.failed[layers] = why
        figure.show(f"{name}, {layers} layers: {why}")
        return None

    return attempt


def _trained(
    options: argparse.Namespace, name: str, layers: int, limit: float
) -> tuple[Run | None, str]:
    """Train a size for `limit` seconds at most; return its figures, or why there are none."""
    build, settings = OPTIONS[name]
    settings = {
        key: value.format(folder=options.folder.resolve()) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    if build.startswith("ours"):
        settings |= {"zero": 3, "activations": "recomputed", "on_meta": True}
    taker = Contender(key=name, label=name, build=build, options=settings)
    # Some updates are made on the host: they have all of its cores.
    setting = Setting(device="cuda", precision="bf16-mixed", threads=machine.cores())
    workload = _workload(options, layers)
    until = time.monotonic() + limit
    try:
        with Crew(taker, workload, 1, limit, setting, until) as ranks:
            stint = ranks.take(WARM_UP + TIMED)
    except TooLate:
        return None, f"more than {limit:.0f} s"
    except NotInstalled as error:
        return None, f"not installed: {error}"
    except (DoesNotFit, CrewFailed) as error:
        return None, str(error).strip().splitlines()[-1][:200]
    seconds = sum(step_times(stint.ends)[-TIMED:]) / TIMED / 1e3
    # The simulated device of the tests takes no time.
    tokens = workload.batch * workload.sequence / max(seconds, 1e-9)
    return Run(tokens, stint.told[0]["peak"]), ""


def _workload(options: argparse.Namespace, layers: int) -> Gpt:
    return Gpt(
        name="largest",
        width=options.width,
        layers=layers,
        vocabulary=options.vocabulary,
        sequence=options.sequence,
        batch=options.batch,
        heads=max(1, options.width // 128),
    )


def _table(options: argparse.Namespace, tried: dict[str, Tried], common: int) -> list[str]:
    shape = f"width {options.width}, sequence {options.sequence}, batch {options.batch}"
    rows = []
    for name, found in tried.items():
        if not found.runs:
            rows.append([name, "none was trained"])
            continue
        layers = max(found.runs)
        run, count = found.runs[layers], _workload(options, layers).parameters
        same = f"{found.runs[common].tokens:,.0f}" if common in found.runs else "-"
        size = f"{'at least ' if found.cut else ''}{count / 1e9:.2f}B"
        rows.append([name, str(layers), size, f"{run.tokens:,.0f}", f"{run.peak / 1e9:.1f}", same])
    head = ["layers", "parameters", "tokens/s", "device GB", f"tokens/s at {common} layers"]
    return figure.table([shape, *head], rows)


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="on the disk")
    for name, value in (("width", 4096), ("vocabulary", 32768), ("sequence", 1024), ("batch", 4)):
        add(f"--{name}", type=figure.positive, default=value, metavar="N")
    add("--contenders", type=_contenders, default=list(OPTIONS), metavar="A,B")
    add("--first", type=figure.positive, default=1, metavar="N", help="layers to try first")
    add("--most", type=figure.positive, default=200, metavar="N", help="and at most")
    add("--budget", type=float, default=math.inf, metavar="S", help="seconds, for all")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one size")
    return parser


def _contenders(text: str) -> list[str]:
    named = figure.words(text)
    if unknown := [name for name in named if name not in OPTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not among {', '.join(OPTIONS)}")
    return named


if __name__ == "__main__":
    sys.exit(main())
