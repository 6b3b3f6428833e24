"""The largest GPT that trains on one GPU, and its tokens/s: plain PyTorch, and states elsewhere.

    python benchmarks/largest.py --folder DIR [--width 4096] [--batch 4] [--most 200] [--timeout S]

Each contender trains in a process of its own, so that what runs out of memory harms nobody. Layers
are doubled until that fails; then the gap is halved. Each recomputes its blocks in backward and
computes in bf16 by autocast, with fp32 parameters under AdamW: the same 16 bytes of a parameter,
somewhere. The last column is the speed of all at the largest size that all of them train.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
from workloads import Gpt

WARM_UP, TIMED = 2, 3

TIERS = {"plain": {}, "ZERO_3 + cpu": {"place": "cpu"}, "ZERO_3 + nvme": {"place": "nvme:{folder}"}}
"""What the contenders are: plain PyTorch, and the engine with all states in one place."""


@dataclass(frozen=True)
class Run:
    """What came of training a size: tokens/s and the peak of the device in bytes."""

    tokens: float
    peak: int


Attempt = Callable[[int], Run | None]
"""Trains so many layers; None where they did not fit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Look for every contender's largest, and print one table."""
    options = _parser().parse_args(arguments)
    if options.child is not None:
        return _child(json.loads(options.child))
    if not _has_gpu():
        print("benchmarks/largest.py needs a GPU, and torch.cuda.is_available() is False here.")
        return 2
    console = Console()
    for name, value in machine.describe().items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    tried: dict[str, dict[int, Run]] = {}
    for name in TIERS:
        with console.status(name):
            runs: dict[int, Run] = {}
            largest(_attempts(options, name, runs, console), options.most)
            tried[name] = runs
    common = min((max(runs, default=0) for runs in tried.values()), default=0)
    for name, runs in tried.items():
        if common and common not in runs:
            _attempts(options, name, runs, console)(common)
    console.print(_table(options, tried, common))
    return 0


def largest(attempt: Attempt, most: int) -> int:
    """The largest number up to `most` at which `attempt` gives a run; 0 for none."""
    fits, fails = 0, most + 1
    trial = 1
    while fits + 1 < fails:
        if attempt(trial) is not None:
            fits = trial
            trial = min(2 * trial, most) if fails > most else (fits + fails) // 2
        else:
            fails = trial
            trial = (fits + fails) // 2
    return fits


def _attempts(
    options: argparse.Namespace, name: str, runs: dict[int, Run], console: Console
) -> Attempt:
    def attempt(layers: int) -> Run | None:
        job = {
            "place": TIERS[name].get("place", "").format(folder=options.folder),
            "workload": asdict(_workload(options, layers)),
        }
        command = [sys.executable, __file__, "--folder", str(options.folder)]
        try:
            done = subprocess.run(
                [*command, "--child", json.dumps(job)],
                capture_output=True,
                text=True,
                timeout=options.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            console.print(f"{name}, {layers} layers: more than {options.timeout:.0f} s")
            return None
        said = done.stdout.strip().splitlines()
        if done.returncode:
            why = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
            console.print(f"{name}, {layers} layers: {why[-1][:150]}", highlight=False)
            return None
        runs[layers] = Run(**json.loads(said[-1]))
        return runs[layers]

    return attempt


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


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _table(options: argparse.Namespace, tried: dict[str, dict[int, Run]], common: int) -> Table:
    title = f"width {options.width}, sequence {options.sequence}, batch {options.batch}, bf16-mixed"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    columns = ("layers", "parameters", "tokens/s", "device GB", f"tokens/s at {common} layers")
    for column in ("", *columns):
        drawn.add_column(column, justify="right" if column else "left")
    for name, runs in tried.items():
        if not runs:
            drawn.add_row(name, "none fits", "", "", "", "")
            continue
        layers = max(runs)
        run, count = runs[layers], _workload(options, layers).parameters
        same = f"{runs[common].tokens:,.0f}" if common in runs else "-"
        size = f"{count / 1e9:.2f}B"
        drawn.add_row(name, str(layers), size, f"{run.tokens:,.0f}", f"{run.peak / 1e9:.1f}", same)
    return drawn


# -- in a process of its own ------------------------------------------------------------------


def _child(job: dict[str, object]) -> int:
    """Train one size and print what came of it."""
    import torch

    import models

    workload = Gpt(**job["workload"])  # type: ignore[arg-type]
    place = str(job["place"])
    step = _ours(workload, place) if place else _plain(workload)
    batches = [tuple(t.cuda() for t in pair) for pair in models.batches(workload, 0, 1)]
    for number in range(WARM_UP + TIMED):
        if number == WARM_UP:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        step(*batches[number % len(batches)])
    torch.cuda.synchronize()
    took = (time.perf_counter() - begun) / TIMED
    tokens = workload.batch * workload.sequence / took
    print(json.dumps({"tokens": tokens, "peak": torch.cuda.max_memory_allocated()}))
    return 0


def _plain(workload: Gpt) -> Callable[..., None]:
    import torch
    from torch.utils.checkpoint import checkpoint

    import models

    with torch.device("cuda"):
        model = models.build(workload)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = models.loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()

    return step


def _ours(workload: Gpt, place: str) -> Callable[..., None]:
    import torch

    import models
    import shardwise as sw

    sw.init(seed=0, device="cuda", quiet=True)
    with sw.on_meta():
        model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = sw.Engine(
        model,
        optimizer,
        zero=3,
        offload_params=place,
        offload_optimizer=place,
        precision="bf16-mixed",
        activations="recomputed",
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        engine.backward(models.loss_of(model, inputs, targets))
        engine.step()

    return step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="on the disk")
    for name, value in (("width", 4096), ("vocabulary", 32768), ("sequence", 1024), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument("--most", type=int, default=200, metavar="N", help="layers to try at most")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for one size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
