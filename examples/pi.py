"""Pi by Monte Carlo: `shardwise run -n 4 examples/pi.py`.

    shardwise run -n 4 examples/pi.py
    mpirun -n 4 python examples/pi.py
    python examples/pi.py --workers 1,2,4,8      # prints the scaling table

Each rank counts points of a square that are inside its circle, and the counts are summed. It prints
the count, the estimate of pi and the seconds. Points are drawn in blocks, each with its own seed,
and ranks share the blocks: so the count is the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import shardwise as sw
from helpers.screen import Screen
from helpers.sizes import add_flags, run_each

BLOCK = 50_000
"""Number of points that are drawn at a time."""

PUBLISHED = {
    1: (3.141988, 8.0290),
    2: (3.1415096, 4.2128),
    4: (3.1425632, 2.0936),
    8: (3.1411632, 1.0611),
}
"""Estimate and seconds for 5 million points, by number of ranks: a Python loop over mpi4py on a
node of ThetaGPU (AI training series of the Argonne Leadership Computing Facility, 2022)."""


def count_inside(seed: int, block: int, points: int) -> int:
    """Draw `points` in the unit square around 0, and count those within 1/2 of 0."""
    x, y = np.random.default_rng((seed, block)).random((2, points)) - 0.5
    return int(np.count_nonzero(x * x + y * y < 0.25))


def count_own(world: sw.World, args: argparse.Namespace, screen: Screen) -> int:
    """Return the count of this rank's blocks."""
    inside = 0
    for block in range(world.rank, math.ceil(args.points / BLOCK), world.size):
        inside += count_inside(args.seed, block, min(BLOCK, args.points - block * BLOCK))
        screen.stepped(f"rank 0: {inside:,} inside")
    return inside


def main() -> None:
    args = arguments()
    if args.workers:
        show(args, run_each(__file__, args.workers, sys.argv[1:]))
        return
    world = sw.init(seed=args.seed)
    seconds = []
    blocks = len(range(0, math.ceil(args.points / BLOCK), world.size))
    with Screen(world, blocks * args.repeats) as screen:
        for _ in range(args.repeats):
            world.barrier()
            start = time.perf_counter()
            inside = int(world.sum(torch.tensor(count_own(world, args, screen))))
            seconds.append(time.perf_counter() - start)
    # The slowest rank of each repeat counts, and of these the fastest repeat.
    best = min(max(repeat) for repeat in zip(*world.gather(seconds), strict=True))
    pi = 4 * inside / args.points
    world.print(f"inside {inside:,} of {args.points:,}: pi is about {pi:.7f}, in {best:.4f} s")
    if args.result and world.is_main:
        args.result.write_text(json.dumps({"inside": inside, "pi": pi, "seconds": best}))


def show(args: argparse.Namespace, found: dict[int, dict[str, float]]) -> None:
    """Print the scaling table, with the published figures in the last columns."""
    table = Table(
        title=f"pi from {args.points:,} points, published ones from 5,000,000; % is efficiency",
        title_justify="left",
    )
    for name in ("ranks", "pi", "seconds", "speed-up", "%"):
        table.add_column(name, justify="right")
    for name in ("published pi", "seconds", "%"):
        table.add_column(name, justify="right", style="dim")
    first = min(found)
    for size, run in found.items():
        speedup = first * found[first]["seconds"] / run["seconds"]
        row = [str(size), f"{run['pi']:.7f}", f"{run['seconds']:.4f}"]
        row += [f"{speedup:.2f}", f"{speedup / size:.0%}"]
        if size in PUBLISHED:
            pi, seconds = PUBLISHED[size]
            row += [f"{pi:.7f}", f"{seconds:.2f}", f"{PUBLISHED[1][1] / seconds / size:.0%}"]
        table.add_row(*row)
    Console().print(table)


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="Pi by Monte Carlo, over any number of ranks.")
    parser.add_argument(
        "--points", type=int, default=5_000_000, help="total number of points (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats, of which the fastest counts (default 3)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the points (default %(default)s)"
    )
    add_flags(parser)
    args = parser.parse_args()
    if args.points < 1 or args.repeats < 1 or args.seed < 0:
        parser.error("--points and --repeats must be above 0, and --seed 0 or more.")
    return args


if __name__ == "__main__":
    main()
