"""The largest GPT that trains on one GPU, and its tokens/s: plain PyTorch, and states elsewhere.

    python benchmarks/largest.py --folder DIR [--width 4096] [--batch 4] [--first 1] [--most 200] \\
        [--contenders "plain,FSDP2 + cpu,ZERO_3 + cpu,ZERO_3 + nvme"] [--timeout S] [--budget S] \\
        [--json FILE]

Each size trains in a process of its own, so that what runs out of memory harms nobody. From --first
on, layers are doubled until that fails; then the gap is halved. Each recomputes its blocks in
backward and computes in bf16 by autocast, with fp32 parameters under AdamW: the same 16 bytes of a
parameter, somewhere. The last column is the speed of all at the largest size that all of them
train. Contenders share the seconds of --budget: who has used up its part stops where it is, and
its size is marked as "at least".
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import crew
import machine
from step_time import positive, words
from workloads import Gpt

WARM_UP, TIMED = 2, 3

CONTENDERS = {
    "plain": "",
    "FSDP2 + cpu": "fsdp2",
    "ZERO_3 + cpu": "cpu",
    "ZERO_3 + nvme": "nvme:{folder}",
}
"""What trains: plain PyTorch, FSDP2 with its CPU offload, and the engine with all states in one
place."""


@dataclass(frozen=True)
class Run:
    """What came of training a size: tokens/s and the peak of the device in bytes."""

    tokens: float
    peak: int


@dataclass
class Tried:
    """A contender's sizes in layers: what came of those that it trained, and why others failed.
    `cut`: time was over before the largest was known."""

    runs: dict[int, Run] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    cut: bool = False


Attempt = Callable[[int], Run | None]
"""Trains so many layers; None where they did not fit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Look for every contender's largest, and print one table."""
    options = _parser().parse_args(arguments)
    if options.child is not None:
        return _child(json.loads(options.child))
    try:
        facts = machine.describe() | machine.describe_device(crew.PYTHON)
    except RuntimeError as error:
        print(f"benchmarks/largest.py: {error}")
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    tried = {name: Tried() for name in options.contenders}
    until = time.monotonic() + options.budget
    for number, (name, found) in enumerate(tried.items()):
        # A last part is for the speeds at the common size.
        part = (until - time.monotonic()) / (len(tried) - number + 1)
        limit = time.monotonic() + part
        largest(_attempts(options, name, found, console, limit), options.most, options.first)
    common = min((max(found.runs, default=0) for found in tried.values()), default=0)
    for name, found in tried.items():
        if common and common not in found.runs:
            _attempts(options, name, found, console, until)(common)
    console.print(_table(options, tried, common))
    if options.json:
        sizes = {name: asdict(found) for name, found in tried.items()}
        written = {"machine": facts, "workload": asdict(_workload(options, 1)), "tried": sizes}
        machine.write_json(options.json, written)
    return 0 if all(found.runs for found in tried.values()) else 1


def largest(attempt: Attempt, most: int, first: int = 1) -> int:
    """The largest number up to `most` at which `attempt` gives a run; 0 for none. The first trial
    is `first`, of which it is best that it fits."""
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


def _attempts(
    options: argparse.Namespace, name: str, found: Tried, console: Console, until: float
) -> Attempt:
    """Trials of one contender until that moment (on the monotonic clock); those after it count as
    failed, and leave their mark."""

    def attempt(layers: int) -> Run | None:
        left = min(options.timeout, until - time.monotonic())
        why = "no time is left"
        if left > 0:
            run, why = _trained(options, name, layers, left)
            if run is not None:
                console.print(f"{name}, {layers} layers: {run.tokens:,.0f} tokens/s", style="dim")
                found.runs[layers] = run
                return run
        found.cut |= time.monotonic() >= until
        found.failed[layers] = why
        console.print(f"{name}, {layers} layers: {why}", highlight=False, markup=False)
        return None

    return attempt


def _trained(
    options: argparse.Namespace, name: str, layers: int, limit: float
) -> tuple[Run | None, str]:
    """Train a size in another process for `limit` seconds at most; what came of it, or why not."""
    place = CONTENDERS[name].format(folder=options.folder)
    job = {"place": place, "workload": asdict(_workload(options, layers))}
    command = [*crew.PYTHON, __file__, "--folder", str(options.folder), "--child", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None, f"more than {limit:.0f} s"
    if done.returncode == 0:
        return Run(**json.loads(done.stdout.strip().splitlines()[-1])), ""
    if done.returncode == -signal.SIGKILL:
        return None, "killed, as the system does for the host's memory"
    said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return None, said[-1][:200]


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


def _table(options: argparse.Namespace, tried: dict[str, Tried], common: int) -> Table:
    title = f"width {options.width}, sequence {options.sequence}, batch {options.batch}, bf16-mixed"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    columns = ("layers", "parameters", "tokens/s", "device GB", f"tokens/s at {common} layers")
    for column in ("", *columns):
        drawn.add_column(column, justify="right" if column else "left")
    for name, found in tried.items():
        if not found.runs:
            drawn.add_row(name, "none was trained", "", "", "", "")
            continue
        layers = max(found.runs)
        run, count = found.runs[layers], _workload(options, layers).parameters
        same = f"{found.runs[common].tokens:,.0f}" if common in found.runs else "-"
        size = f"{'at least ' if found.cut else ''}{count / 1e9:.2f}B"
        drawn.add_row(name, str(layers), size, f"{run.tokens:,.0f}", f"{run.peak / 1e9:.1f}", same)
    return drawn


# -- in a process of its own ------------------------------------------------------------------


def _child(job: dict[str, object]) -> int:
    """Train one size and print what came of it."""
    import torch

    import models

    workload = Gpt(**job["workload"])  # type: ignore[arg-type]
    place = str(job["place"])
    torch.set_num_threads(machine.cores())  # some updates are made on the host
    build = {"": _plain, "fsdp2": _fsdp2}.get(place)
    step = build(workload) if build else _ours(workload, place)
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

    import models

    with torch.device("cuda"):
        model = models.build(workload)
    for block in model.blocks:
        _recompute(block)
    return _autocast_step(model)


def _fsdp2(workload: Gpt) -> Callable[..., None]:
    """Its parameters rest on the host; no more than a block's are made on the device at once."""
    import torch
    from torch import distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    import models

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    mesh = dist.init_device_mesh("cuda", (1,))
    with torch.device("meta"):
        model = models.build(workload)
    for unit in [*model.blocks, model]:
        models.materialise(unit, "cuda")
        fully_shard(unit, mesh=mesh, offload_policy=CPUOffloadPolicy())
    for block in model.blocks:
        _recompute(block)
    return _autocast_step(model)


def _recompute(block: Any) -> None:
    """Have a block forget what is inside it until backward."""
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def _autocast_step(model: Any) -> Callable[..., None]:
    """The plain loop, in bf16-mixed with torch's fused AdamW."""
    import torch

    import models

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
        parser.add_argument(f"--{name}", type=positive, default=value, metavar="N")
    parser.add_argument("--contenders", type=_contenders, default=list(CONTENDERS), metavar="A,B")
    parser.add_argument(
        "--first", type=positive, default=1, metavar="N", help="layers to try first"
    )
    parser.add_argument("--most", type=positive, default=200, metavar="N", help="and at most")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="S", help="seconds, for all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for one size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _contenders(text: str) -> list[str]:
    named = words(text)
    if unknown := [name for name in named if name not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not among {', '.join(CONTENDERS)}")
    return named


if __name__ == "__main__":
    sys.exit(main())
