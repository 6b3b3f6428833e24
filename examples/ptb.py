"""An LSTM on the Penn Treebank: `shardwise run -n 2 examples/ptb.py --data my/ptb`.

    shardwise run -n 2 examples/ptb.py --data my/ptb --config small
    shardwise run -n 4 --exact 4 examples/ptb.py --data my/ptb          # same bits as 1 worker
    shardwise run -n 4 examples/ptb.py --data my/ptb --double           # same losses, to 1e-8
    python examples/ptb.py --data my/ptb --workers 1,2,4                # a table of all sizes
    mpirun -n 2 python examples/ptb.py --data my/ptb

It prints the seconds and perplexities of each epoch, and the test perplexity.

The total batch is fixed, so the learning rate and the perplexities are those of one worker. In fp32
the losses of the small model agree for some steps only: at a learning rate of 1 rounding errors
grow, just as between two runs of one worker with different numbers of threads.

Models and schedules are from Zaremba et al. (2014, arXiv:1409.2329).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwise as sw
from helpers import batches, lanes
from helpers.screen import Screen
from helpers.sizes import add_flags, run_each

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model and its schedule. After `decay_from` the rate is decay ** (epoch - decay_from)."""

    hidden: int
    steps: int
    epochs: int
    init: float
    keep: float
    clip: float
    decay: float
    decay_from: int


CONFIGS = {
    "small": Config(
        hidden=200, steps=20, epochs=13, init=0.1, keep=1.0, clip=5, decay=0.5, decay_from=3
    ),
    "medium": Config(
        hidden=650, steps=35, epochs=39, init=0.05, keep=0.5, clip=5, decay=0.8, decay_from=5
    ),
    "large": Config(
        hidden=1500,
        steps=35,
        epochs=55,
        init=0.04,
        keep=0.35,
        clip=10,
        decay=1 / 1.15,
        decay_from=14,
    ),
}

PUBLISHED = {
    "small": (40.81, 118.99, 114.72, 137, 207),
    "medium": (44.18, 87.63, 84.42, 311, 461),
    "large": (36.54, 82.55, 78.72, 931, 1765),
}
"""Perplexities of training, validation and test, and seconds per epoch on 1 and 2 GPUs, from
Texar's documentation of its Horovod example (two AWS p2.xlarge, Penn Treebank)."""


class Model(nn.Module):
    """Maps tokens (rows, steps) and a state to logits (rows, steps, words) and the next state."""

    def __init__(self, words: int, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, config.hidden)
        self.drop = nn.Dropout(1 - config.keep)
        self.lstm = nn.LSTM(
            config.hidden, config.hidden, num_layers=2, dropout=1 - config.keep, batch_first=True
        )
        self.head = nn.Linear(config.hidden, words)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -config.init, config.init)

    def forward(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        out, state = self.lstm(self.drop(self.embed(tokens)), state)
        return self.head(self.drop(out)), state


class Memory:
    """The state of the LSTM for this rank's lanes, by micro-batch.

    Micro-batch i of every step has the same lanes.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def __getitem__(self, part: int) -> State | None:
        return self._states.get(part)

    def __setitem__(self, part: int, state: State) -> None:
        self._states[part] = (state[0].detach(), state[1].detach())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, summed over the steps and averaged over the lanes."""
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / len(targets)


def train_epoch(
    engine: sw.Engine, model: Model, loader: sw.Loader, clip: float, screen: Screen
) -> tuple[list[float], int]:
    """Train an epoch. Returns the loss of each step, and the number of tokens in a lane."""
    memory, losses, tokens = Memory(), [], 0
    for step in loader.steps():
        for part, (x, y) in enumerate(step):
            logits, memory[part] = model(x, memory[part])
            engine.backward(loss_of(logits, y))
        stats = engine.step(max_norm=clip)
        losses.append(float(stats.loss))
        tokens += x.shape[1]
        screen.stepped(f"perplexity {math.exp(sum(losses) / tokens):,.1f}")
    return losses, tokens


def perplexity(model: Model, loader: sw.Loader) -> float:
    """Return the perplexity of all lanes over all workers: exp of the mean loss per token."""
    metrics, memory = sw.Metrics(), Memory()
    model.eval()
    with torch.no_grad():
        for step in loader.steps():
            for part, (x, y) in enumerate(step):
                logits, memory[part] = model(x, memory[part])
                metrics.add(n=y.numel(), loss=loss_of(logits, y) / y.shape[1])
    model.train()
    return math.exp(metrics.compute()["loss"])


def run(world: sw.World, text: lanes.Text, config: Config, args: argparse.Namespace) -> Any:
    """Train and evaluate, and return the results as plain values for JSON."""

    def read(tokens: Tensor) -> sw.Loader:
        read_by = lanes.Lanes(tokens, args.batch_size, config.steps)
        return sw.Loader(read_by, batch_size=args.batch_size)

    dtype = torch.float64 if args.double else torch.float32
    model = Model(len(text.vocabulary), config).to(world.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: config.decay ** max(0, epoch - config.decay_from)
    )
    engine = sw.Engine(model, optimizer)
    loader, held_out, test = map(read, (text.training, text.validation, text.test))
    found: dict[str, Any] = {"losses": [], "training": [], "validation": [], "seconds": []}
    with Screen(world, config.epochs * len(loader)) as screen:
        for epoch in loader.epochs(config.epochs):
            start = time.perf_counter()
            losses, tokens = train_epoch(engine, model, loader, config.clip, screen)
            scheduler.step()
            found["seconds"].append(time.perf_counter() - start)
            found["losses"] += losses
            found["training"].append(math.exp(sum(losses) / tokens))
            found["validation"].append(perplexity(model, held_out))
            screen.say(
                f"epoch {epoch + 1:>2}/{config.epochs} · {found['seconds'][-1]:.1f} s · "
                f"perplexity: training {found['training'][-1]:,.2f}, "
                f"validation {found['validation'][-1]:,.2f}"
            )
        found["test"] = perplexity(model, test)
        screen.say(f"test perplexity {found['test']:,.2f}")
    return found


def main() -> None:
    args = arguments()
    if args.workers:
        show(args, run_each(__file__, args.workers, sys.argv[1:]))
        return
    world = sw.init(seed=0)
    batches.refuse_batch_per_worker(
        world, "ptb", "a step is one window of every lane, shared by all workers"
    )
    changed = {name: getattr(args, name) for name in ("hidden", "steps", "epochs")}
    known = vars(CONFIGS[args.config])
    config = Config(**known | {name: value for name, value in changed.items() if value})
    try:
        text = lanes.read(args.data, args.vocabulary)
        found = run(world, text, config, args)
    except lanes.TextError as error:
        world.print(f"ptb: {error}", file=sys.stderr)
        sys.exit(2)
    if args.result and world.is_main:
        args.result.write_text(json.dumps(found))


def show(args: argparse.Namespace, found: dict[int, Any]) -> None:
    """Print the table of all sizes, with the published figures in the last rows."""
    table = Table(title=f"{args.config}, total batch {args.batch_size}", title_justify="left")
    for name in ("workers", "epochs", "train", "valid", "test", "s/epoch"):
        table.add_column(name, justify="right")
    for size, each in found.items():
        perplexities = (each["training"][-1], each["validation"][-1], each["test"])
        seconds = sorted(each["seconds"])[len(each["seconds"]) // 2]
        epochs = str(len(each["seconds"]))
        table.add_row(str(size), epochs, *(f"{p:,.2f}" for p in perplexities), f"{seconds:.1f}")
    table.add_section()
    *perplexities, alone, two = PUBLISHED[args.config]
    epochs = str(CONFIGS[args.config].epochs)
    for size, seconds in ((1, alone), (2, two)):
        row = (f"PTB on {size} GPU", epochs, *(f"{p:,.2f}" for p in perplexities), str(seconds))
        table.add_row(*row, style="dim")
    Console().print(table)


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="An LSTM language model.")
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="folder with ptb.train.txt"
    )
    number = "(default %(default)s)"
    parser.add_argument(
        "--config", choices=CONFIGS, default="small", help=f"model and schedule {number}"
    )
    parser.add_argument(
        "--batch-size", default=20, help=f"lanes in a total batch {number}", **whole
    )
    parser.add_argument("--vocabulary", default=10_000, help=f"number of words {number}", **whole)
    parser.add_argument("--hidden", help="hidden size (default: of --config)", **whole)
    parser.add_argument("--steps", help="tokens in a window (default: of --config)", **whole)
    parser.add_argument("--epochs", help="number of epochs (default: of --config)", **whole)
    parser.add_argument("--double", action="store_true", help="compute in fp64")
    add_flags(parser)
    args = parser.parse_args()
    numbers = (args.batch_size, args.vocabulary, args.hidden, args.steps, args.epochs)
    if min(number for number in numbers if number is not None) < 1:
        parser.error("numbers must be above 0.")
    return args


if __name__ == "__main__":
    main()
