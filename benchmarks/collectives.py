"""What the primitives of a step cost on this machine, torch's own and through Shardwise's seam.

    python benchmarks/collectives.py [--ranks 2,4] [--mb 64] [--repeats 15]

Every operation is timed on its own, after a barrier, from the moment the last rank began to the
moment the last one ended; the table shows the median over the repeats.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
from primitives import Operation, large, ours, small

Spans = dict[str, list[tuple[int, int]]]
"""For each operation, when each of its repeats began and ended on this rank, in ns."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure at each number of ranks and print one table."""
    options = _parser().parse_args(arguments)
    console = Console()
    for name, value in machine.describe().items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    columns = {}
    for ranks in options.ranks:
        with console.status(f"{ranks} ranks"):
            columns[ranks] = _measure(ranks, options.mb, options.repeats)
    console.print(_table(columns, options.mb))
    return 0


def _measure(ranks: int, mb: int, repeats: int) -> dict[str, float]:
    """Median ms by operation, at one number of ranks."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    numel = mb * 2**20 // 4 // ranks * ranks
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        mp.start_processes(_rank, (ranks, folder, numel, repeats), nprocs=ranks)
        spans = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    return {name: _median_ms([rank[name] for rank in spans]) for name in spans[0]}


def _median_ms(ranks: Sequence[Sequence[tuple[int, int]]]) -> float:
    repeats = zip(*ranks, strict=True)
    return median((max(e for _, e in r) - max(b for b, _ in r)) / 1e6 for r in repeats)


def _rank(rank: int, size: int, folder: str, numel: int, repeats: int) -> None:
    """One rank: run every operation, in the same order as all others."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    spans: Spans = {}
    for operations in (large(numel, rank, size), small(), ours(numel, rank, size)):
        spans |= {name: _time(run, repeats) for name, run in operations.items()}
    torch.save(spans, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _time(run: Operation, repeats: int) -> list[tuple[int, int]]:
    """Two runs to warm up, then the timed ones."""
    spans = []
    for _ in range(2 + repeats):
        dist.barrier()
        begun = time.monotonic_ns()
        run()
        spans.append((begun, time.monotonic_ns()))
    return spans[2:]


def _table(columns: dict[int, dict[str, float]], mb: int) -> Table:
    drawn = Table(box=SIMPLE, title=f"{mb} MB of fp32, median ms", title_justify="left")
    drawn.add_column("", no_wrap=True)
    for ranks in columns:
        drawn.add_column(f"{ranks} ranks", justify="right")
    for name in next(iter(columns.values())):
        drawn.add_row(name, *(f"{column[name]:.2f}" for column in columns.values()))
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], metavar="2,4")
    parser.add_argument("--mb", type=int, default=64, metavar="N")
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
