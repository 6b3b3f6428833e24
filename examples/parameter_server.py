"""Bounded staleness with workers that are slow at times: `python examples/parameter_server.py`.

    python examples/parameter_server.py               # --behind 0, 1 and 3
    shardwise run -n 2 --islands 2 --behind 3 examples/parameter_server.py          # one of them

The first command prints a table of staleness, perplexity and waiting time, and writes
runs/parameter_server/loss_and_waiting.png and curves.json. The second prints the held-out
perplexity.

A GPT trains on two islands. The training loop is an ordinary one: only flags turn it into a
parameter server of bounded staleness. In each step every worker draws, from a seed, whether it is
slow. If so, it sleeps until the step has taken three times as long. (A worker that is always slow
would slow down every scheme.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import diloco
import shardwise as sw
from helpers import corpus, gpt, staleness_plot
from shardwise.engine import StepStats

BEHIND = (0, 1, 3)


def main() -> None:
    args = arguments()
    if args.is_started:
        train(sw.init(seed=args.seed), args)
    else:
        compare(args)


def train(world: sw.World, args: argparse.Namespace) -> None:
    """Train with the flags of this run, and write --result."""
    text = diloco.read(world, args)
    model = gpt.GPT(diloco.shape(args, text)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    steps = args.tokens // (args.batch_size * args.context)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )
    engine = sw.Engine(model, optimizer)
    windows, held_out = text.windows(args.context, args.held_out)
    loader = sw.Loader(windows, batch_size=args.batch_size, shuffle=True)
    held_out_loader = sw.Loader(held_out, batch_size=min(64, args.held_out))
    curve, pace = diloco.Curve(world, steps, args.evaluations), Pace(world, args)
    for micro_batches in itertools.islice(diloco.endless(loader, steps), steps):
        pace.begins()
        for tokens, targets in micro_batches:
            engine.forward_backward(partial(gpt.token_loss, model), tokens, targets)
        pace.computed()
        pace.stepped(engine.step(max_norm=1.0))
        scheduler.step()
        if curve.stepped():
            curve.evaluated(diloco.evaluate(model, held_out_loader))
    found = pace.over_workers(world) | {"curve": curve.points, "steps": steps}
    if world.is_main and args.result:
        args.result.write_text(json.dumps(found))


class Pace:
    """Slows this worker down, and sums the seconds of computing and of waiting."""

    def __init__(self, world: sw.World, args: argparse.Namespace) -> None:
        self._draws = random.Random(f"{args.seed} {world.rank}")
        self._share, self._times = args.slow, args.times
        self._begun = self._computing = self._waiting = 0.0
        self._stalest = 0

    def begins(self) -> None:
        """Record the begin of a step."""
        self._begun = time.perf_counter()

    def computed(self) -> None:
        """Record that the gradients are computed. A slow worker sleeps now."""
        if self._draws.random() < self._share:
            time.sleep((self._times - 1) * (time.perf_counter() - self._begun))
        self._computing += time.perf_counter() - self._begun

    def stepped(self, stats: StepStats) -> None:
        """Record the end of the step."""
        self._waiting += stats.waited
        self._stalest = max(self._stalest, stats.staleness)

    def over_workers(self, world: sw.World) -> dict[str, float]:
        """Return the mean seconds over all workers, and the largest staleness."""
        several = world.gather((self._computing, self._waiting, self._stalest))
        computing, waiting, stalest = zip(*several, strict=True)
        return {
            "computing": sum(computing) / world.size,
            "waiting": sum(waiting) / world.size,
            "staleness": max(stalest),
        }


# -- comparison of --behind ----------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    """Train with each value of --behind, print the table and draw the plot."""
    print(f"reading {args.data or 'the standard library'}, learning a tokenizer", flush=True)
    text = diloco.read_text(args)
    if isinstance(text, corpus.CorpusError):
        sys.exit(f"parameter_server: {text}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "corpus.pickle"
        kept.write_bytes(pickle.dumps(text))
        found = {behind: run(behind, kept, Path(folder)) for behind in BEHIND}
    (args.out / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found, args)
    staleness_plot.draw(found, args.out / "loss_and_waiting.png", args.batch_size)
    print(f"in {args.out}: loss_and_waiting.png and curves.json")


def run(behind: int, kept: Path, folder: Path) -> dict[str, Any]:
    """Run this script with --behind and return its result. Exits if it fails."""
    print(f"== --behind {behind}", flush=True)
    result = folder / "result.json"
    own = ["--corpus", str(kept), "--result", str(result), *sys.argv[1:]]
    flags = ["-n", "2", "--islands", "2", "--behind", str(behind)]
    command = [sys.executable, "-m", "shardwise", "run", *flags, __file__, *own]
    code = subprocess.call(command, env={"OMP_NUM_THREADS": "1"} | os.environ)
    if code:
        sys.exit(code)
    return dict(json.loads(result.read_text()))


def show(found: dict[int, dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table of all runs."""
    slow = f"each {args.times:g} times as slow in {args.slow:.0%} of its steps"
    table = Table(title=f"two islands, one worker each, {slow}", title_justify="left")
    columns = ("behind", "largest staleness", "held-out perplexity", "ms computing", "ms waiting")
    for name in columns:
        table.add_column(name, justify="right")
    for behind, result in found.items():
        table.add_row(
            f"{behind}",
            f"{result['staleness']:.0f}",
            f"{math.exp(result['curve'][-1]['loss']):,.1f}",
            f"{1e3 * result['computing'] / result['steps']:,.1f}",
            f"{1e3 * result['waiting'] / result['steps']:,.1f}",
        )
    Console().print(table)


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="Bounded staleness with workers slow at times.")
    number = "(default %(default)s)"
    parser.add_argument("--data", type=Path, metavar="PATH", help="a file or folder of text")
    parser.add_argument("--tokens", type=int, default=200_000, help=f"tokens to train on {number}")
    parser.add_argument(
        "--batch-size", type=int, default=16, help=f"windows in a total batch {number}"
    )
    parser.add_argument("--context", type=int, default=64, help=f"tokens in a window {number}")
    parser.add_argument("--vocabulary", type=int, default=512, help=f"distinct tokens {number}")
    parser.add_argument("--layers", type=int, default=2, help=f"blocks {number}")
    parser.add_argument("--width", type=int, default=64, help=f"numbers per token {number}")
    parser.add_argument("--heads", type=int, default=4, help=f"attention heads {number}")
    parser.add_argument("--lr", type=float, default=4e-3, help=f"peak learning rate {number}")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of the run {number}")
    parser.add_argument(
        "--slow", type=float, default=1 / 6, help="fraction of slow steps (default 1/6)"
    )
    parser.add_argument("--times", type=float, default=3.0, help=f"factor of slow steps {number}")
    parser.add_argument(
        "--held-out", type=int, default=256, metavar="N", help=f"windows to evaluate {number}"
    )
    parser.add_argument(
        "--evaluations", type=int, default=10, metavar="N", help=f"evaluations per run {number}"
    )
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/parameter_server"), help=f"folder to write {number}"
    )
    args = parser.parse_args()
    least = 20 * args.batch_size * args.context
    if args.tokens < least:
        parser.error(f"--tokens {args.tokens} is less than 20 steps need: write {least} or more")
    args.is_started = "SHARDWISE_LAUNCH_RANK" in os.environ or "RANK" in os.environ
    return args


if __name__ == "__main__":
    main()
