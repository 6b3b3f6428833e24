"""A GPT on two islands with four ways to synchronise: `python examples/diloco.py`.

    python examples/diloco.py                            # trains in each way
    shardwise run -n 2 --islands 2 --equal-every 30 --wire int8 examples/diloco.py     # one way

The first command prints a table of perplexity, bytes sent and seconds per way, and writes
runs/diloco/bytes_and_seconds.png and curves.json. The second prints the held-out perplexity.

The model learns Python's standard library. The training loop is an ordinary one: only flags turn it
into islands. Evaluations use the anchor, the parameters that the islands agreed on last.

One machine has no slow link, so the plot computes its seconds: the seconds of the steps, plus the
seconds that the bytes would take at --megabits. With --late the transfer runs parallel to the
steps, and the longer of the two counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardwise as sw
from helpers import corpus, gpt, islands_plot

EVERY_30 = ("--islands", "2", "--equal-every", "30")
WAYS = {
    "every step, gradients": (),
    "every 30 steps, fp32": EVERY_30,
    "every 30 steps, int8, Nesterov": (*EVERY_30, "--wire", "int8", "--outer", "nesterov:0.7,0.9"),
    "every 30 steps, int4, late 10": (*EVERY_30, "--wire", "int4", "--late", "10"),
}
"""The flags of each way to synchronise the islands."""


def main() -> None:
    args = arguments()
    if args.is_started:
        train(sw.init(seed=args.seed), args)
    else:
        compare(args)


def train(world: sw.World, args: argparse.Namespace) -> None:
    """Train with the flags of this run, and write --result."""
    text = read(world, args)
    model = gpt.GPT(shape(args, text)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    steps = args.tokens // (args.batch_size * args.context)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )
    engine = sw.Engine(model, optimizer)
    windows, held_out = text.windows(args.context, args.held_out)
    loader = sw.Loader(windows, batch_size=args.batch_size, shuffle=True)
    held_out_loader = sw.Loader(held_out, batch_size=min(64, args.held_out))
    curve = Curve(world, steps, args.evaluations)
    for micro_batches in itertools.islice(endless(loader, steps), steps):
        for tokens, targets in micro_batches:
            engine.forward_backward(partial(gpt.token_loss, model), tokens, targets)
        engine.step(max_norm=1.0)
        scheduler.step()
        if curve.stepped():
            with engine.anchor():
                curve.evaluated(evaluate(model, held_out_loader))
    if world.is_main and args.result:
        found = {"parameters": model.number_of_parameters, "curve": curve.points}
        args.result.write_text(json.dumps(found))


def endless(loader: sw.Loader[Any], steps: int) -> Iterator[Any]:
    """Yield the steps of the loader, for as many epochs as `steps` steps may need."""
    for _ in loader.epochs(steps):
        yield from loader.steps()


class Curve:
    """The held-out loss against steps, and against seconds of training without evaluations."""

    def __init__(self, world: sw.World, steps: int, evaluations: int) -> None:
        self.points: list[dict[str, Any]] = []
        self._world, self._steps, self._step = world, steps, 0
        self._every = max(1, steps // evaluations)
        self._seconds, self._begun = 0.0, time.monotonic()

    def stepped(self) -> bool:
        """Count a step, and return whether to evaluate now."""
        self._step += 1
        due = self._step % self._every == 0 or self._step == self._steps
        if due:
            self._seconds += time.monotonic() - self._begun
        return due

    def evaluated(self, loss: float) -> None:
        """Record a held-out loss, and continue to count seconds."""
        self.points.append({"step": self._step, "seconds": self._seconds, "loss": loss})
        where = f"step {self._step:>4} of {self._steps}"
        self._world.print(f"{where}: held-out perplexity {math.exp(loss):,.1f}")
        self._begun = time.monotonic()


def evaluate(model: gpt.GPT, loader: sw.Loader) -> float:
    """Return the mean loss per token on all held-out windows, over all workers."""
    metrics = sw.Metrics()
    model.eval()
    with torch.no_grad():
        for tokens, targets in loader:
            metrics.add(n=targets.numel(), loss=gpt.token_loss(model, tokens, targets))
    model.train()
    return float(metrics.compute()["loss"])


def read(world: sw.World, args: argparse.Namespace) -> corpus.Corpus:
    """Return the text, which the main rank reads and sends to the others."""
    text: corpus.Corpus | corpus.CorpusError | None = None
    if world.is_main:
        text = read_text(args)
    text = world.broadcast_object(text)
    if not isinstance(text, corpus.Corpus):
        world.print(f"diloco: {text}", file=sys.stderr)
        sys.exit(2)
    return text


def read_text(args: argparse.Namespace) -> corpus.Corpus | corpus.CorpusError:
    """Return the text, or the error if there is none."""
    if args.corpus:
        return pickle.loads(args.corpus.read_bytes())  # `compare` has written it
    try:
        text = corpus.read(args.data, vocabulary=args.vocabulary)
        text.windows(args.context, args.held_out)
        return text
    except corpus.CorpusError as error:
        return error


def shape(args: argparse.Namespace, text: corpus.Corpus) -> gpt.Shape:
    """Return the sizes of the model from the flags."""
    return gpt.Shape(
        vocabulary=len(text.tokenizer.tokens),
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
    )


# -- all ways ------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    """Train in each way, print the table and draw the plot."""
    print(f"reading {args.data or 'the standard library'}, learning a tokenizer", flush=True)
    text = read_text(args)
    if isinstance(text, corpus.CorpusError):
        sys.exit(f"diloco: {text}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "corpus.pickle"
        kept.write_bytes(pickle.dumps(text))
        found = {way: run(way, flags, kept, Path(folder)) for way, flags in WAYS.items()}
    for way, result in found.items():
        add_link(result, WAYS[way], args)
    (args.out / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found, args)
    path = args.out / "bytes_and_seconds.png"
    islands_plot.draw({way: result["curve"] for way, result in found.items()}, path, args.megabits)
    print(f"in {args.out}: bytes_and_seconds.png and curves.json")


def run(way: str, flags: tuple[str, ...], kept: Path, folder: Path) -> dict[str, Any]:
    """Run this script in one way and return its result. Exits if it fails."""
    print(f"== {way}", flush=True)
    result = folder / "result.json"
    own = ["--corpus", str(kept), "--result", str(result), *sys.argv[1:]]
    command = [sys.executable, "-m", "shardwise", "run", "-n", "2", *flags, __file__, *own]
    code = subprocess.call(command, env={"OMP_NUM_THREADS": "1"} | os.environ)
    if code:
        sys.exit(code)
    return dict(json.loads(result.read_text()))


BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
"""Bytes per value in each format. In int8 and int4, blocks of 256 values share an fp32 scale."""


def add_link(result: dict[str, Any], flags: tuple[str, ...], args: argparse.Namespace) -> None:
    """Add to each point of a curve the bytes that an island has sent, and the seconds over the
    link."""
    said = dict(zip(flags[::2], flags[1::2], strict=True))
    every, wire = int(said.get("--equal-every", 1)), said.get("--wire", "fp32")
    for point in result["curve"]:
        point["bytes"] = point["step"] // every * BYTES[wire] * result["parameters"]
        travelling = point["bytes"] * 8 / (args.megabits * 1e6)
        here = point["seconds"]
        point["at_rate"] = max(here, travelling) if "--late" in said else here + travelling


def show(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table of all ways."""
    table = Table(title="two islands, one worker each", title_justify="left")
    rate = f"s at {args.megabits:g} Mbit/s"
    for name in ("made equal", "held-out perplexity", "MB sent", "s here", rate):
        table.add_column(name, justify="left" if name == "made equal" else "right")
    for way, result in found.items():
        last = result["curve"][-1]
        table.add_row(
            way,
            f"{math.exp(last['loss']):,.1f}",
            f"{last['bytes'] / 1e6:,.2f}",
            f"{last['seconds']:,.0f}",
            f"{last['at_rate']:,.0f}",
        )
    Console().print(table)


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="Two islands, synchronised in several ways.")
    number = "(default %(default)s)"
    parser.add_argument("--data", type=Path, metavar="PATH", help="a file or folder of text")
    parser.add_argument("--tokens", type=int, default=600_000, help=f"tokens to train on {number}")
    parser.add_argument(
        "--batch-size", type=int, default=32, help=f"windows in a total batch {number}"
    )
    parser.add_argument("--context", type=int, default=64, help=f"tokens in a window {number}")
    parser.add_argument("--vocabulary", type=int, default=1024, help=f"distinct tokens {number}")
    parser.add_argument("--layers", type=int, default=3, help=f"blocks {number}")
    parser.add_argument("--width", type=int, default=128, help=f"numbers per token {number}")
    parser.add_argument("--heads", type=int, default=4, help=f"attention heads {number}")
    parser.add_argument("--lr", type=float, default=4e-3, help=f"peak learning rate {number}")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of the run {number}")
    parser.add_argument(
        "--held-out", type=int, default=256, metavar="N", help=f"windows to evaluate {number}"
    )
    parser.add_argument(
        "--evaluations", type=int, default=10, metavar="N", help=f"evaluations per run {number}"
    )
    parser.add_argument(
        "--megabits", type=float, default=10.0, help=f"Mbit/s of the assumed link {number}"
    )
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/diloco"), help=f"folder to write {number}"
    )
    args = parser.parse_args()
    least = 20 * args.batch_size * args.context
    if args.tokens < least:
        parser.error(f"--tokens {args.tokens} is less than 20 steps need: write {least} or more")
    args.is_started = "SHARDWISE_LAUNCH_RANK" in os.environ or "RANK" in os.environ
    return args


if __name__ == "__main__":
    main()
