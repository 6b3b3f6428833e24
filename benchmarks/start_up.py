"""Time from the command to the end of the first step: `shardwise run`, and torchrun with DDP.

    python benchmarks/start_up.py [--ranks 2] [--rounds 5]

Both start the same small model with AdamW on a CPU, once without timing, and then take turns. A
round's time ends when rank 0 has made its first step; the time until the command has returned
follows. CPU seconds are those of all processes of a command.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN
from statistics import median

import figure
from machine import cpu_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Start each in turns, and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"ranks": 2, "rounds": 5})
    parser.add_argument("--worker", choices=("shardwise", "ddp"), help=argparse.SUPPRESS)
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        (_ours if options.worker == "shardwise" else _ddp)(options.note)
        return 0
    facts = figure.begin()
    ranks = str(options.ranks)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    commands = {
        "torchrun with DDP": (torchrun, "ddp"),
        "shardwise run": (["shardwise", "run", "-n", ranks], "shardwise"),
    }
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for command in commands.values():
        _start(*command)
    for number in range(options.rounds):
        # Alternate which one is first, because the first start of a round may find colder caches.
        for name in list(commands)[:: -1 if number % 2 else 1]:
            runs[name].append(_start(*commands[name]))
    base = median(first for first, _, _ in runs["torchrun with DDP"])
    rows = []
    for name, times in runs.items():
        first, end, cpu = (median(column) for column in zip(*times, strict=True))
        rows.append([name, f"{first:.2f}", f"{first / base:.2f}", f"{end:.2f}", f"{cpu:.1f}"])
    head = [f"{ranks} ranks", "s to the first step", "x torchrun", "s to the end", "CPU s"]
    figure.show(*figure.table(head, rows))
    figure.keep(options, facts, runs=runs)
    return 0


def _start(launcher: Sequence[str], worker: str) -> tuple[float, float, float]:
    """Return the seconds to the first step and to the end, and the CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        note = Path(folder) / "first"
        command = [sys.executable, "-m", *launcher, __file__, "--worker", worker]
        used, begun = cpu_seconds(RUSAGE_CHILDREN), time.time()
        # pip writes the bytecode of an installed package. A checkout has it after the first start.
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run([*command, f"--note={note}"], check=True, capture_output=True, env=env)
        cpu = cpu_seconds(RUSAGE_CHILDREN) - used
        return float(note.read_text()) - begun, time.time() - begun, cpu


def _ours(note: Path) -> None:
    import torch

    import shardwise as sw

    world = sw.init(seed=0, quiet=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
    engine.backward(model(world.share(torch.ones(8, 64))).square().mean())
    engine.step()
    if world.is_main:
        note.write_text(str(time.time()))


def _ddp(note: Path) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = 8 // distributed.get_world_size()
    wrapped(torch.ones(rows, 64)).square().mean().backward()
    optimizer.step()
    if distributed.get_rank() == 0:
        note.write_text(str(time.time()))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
