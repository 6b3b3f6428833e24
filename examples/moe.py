"""A mixture of experts that learns source code: `shardwise run -n 2 --expert 2 examples/moe.py`.

    shardwise run -n 2 --expert 2 --zero 2 examples/moe.py
    python examples/moe.py                                    # the same with one worker
    shardwise run -n 4 --expert 2 --zero 3 examples/moe.py --experts 16 --data my/texts

A small GPT learns Python's standard library, or the text of --data. In every second block, each
token uses 2 of 8 experts and a shared expert. The losses are the same for every number of workers
and for every --expert. It prints losses, held-out perplexities and how often each expert was used.
It writes metrics.jsonl, tensorboard/, usage.png and model.safetensors into runs/moe.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
from rich.table import Table
from torch import Tensor, nn

import shardwise as sw
from helpers import corpus, gpt
from helpers.log import Log

matplotlib.use("Agg")
from matplotlib import pyplot as plt


class Expert(nn.Module):
    """A feed-forward network with a gate (SwiGLU)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, width) for (n, width)."""
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * value)


class ExpertBlock(nn.Module):
    """Attention and a mixture of experts, each with a residual connection."""

    def __init__(self, shape: gpt.Shape, args: argparse.Namespace) -> None:
        super().__init__()
        width, hidden = shape.width, shape.width
        self.attention_norm = nn.RMSNorm(width)
        self.attention = gpt.Attention(shape)
        self.moe_norm = nn.RMSNorm(width)
        self.moe = sw.MoE(
            nn.Linear(width, args.experts, bias=False),
            nn.ModuleList([Expert(width, hidden) for _ in range(args.experts)]),
            top_k=2,
            shared=Expert(width, hidden),
            balance=args.balance,
            z_loss=1e-3,
        )

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.moe(self.moe_norm(x))


def main() -> None:
    """Train, evaluate, and show which experts the tokens used."""
    args = arguments()
    world = sw.init(seed=0)
    text = shared_text(world, args)
    shape = gpt.Shape(
        vocabulary=len(text.tokenizer.tokens),
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=4,
    )
    model = gpt.GPT(shape)
    for number in range(1, args.layers, 2):
        model.blocks[number] = ExpertBlock(shape, args)
    model.initialise()
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    engine = sw.Engine(model, optimizer)
    windows, held_out = text.windows(args.context, args.held_out)
    loader = sw.Loader(windows, batch_size=args.batch_size, shuffle=True)
    held_out_loader = sw.Loader(held_out, batch_size=args.batch_size, drop_last=True)

    usage: dict[str, Usage] = {}
    with Log(args.out, args.steps, visible=world.is_main) as log:
        log.say(f"held-out perplexity at the start: {perplexity(model, held_out_loader):,.1f}")
        train(engine, model, loader, log, usage)
        log.say(f"held-out perplexity at the end: {perplexity(model, held_out_loader):,.1f}")

    engine.export(args.out / "model.safetensors")
    if world.is_main:
        show(usage, args.out / "usage.png")


@dataclass
class Usage:
    """How often each expert of a layer has been used, and how evenly in each step."""

    copies: Tensor
    entropies: list[float] = field(default_factory=list)


def train(
    engine: sw.Engine, model: gpt.GPT, loader: sw.Loader, log: Log, usage: dict[str, Usage]
) -> None:
    """Train for `log.steps` steps, and record losses and the use of experts."""
    for _ in loader.epochs(log.steps):  # always enough, because an epoch has at least one step
        for tokens, targets in loader:
            engine.backward(gpt.token_loss(model, tokens, targets))
            stats = engine.step(max_norm=1.0)
            figures = {}
            for name, counts in stats.experts.items():
                used = usage.setdefault(name, Usage(torch.zeros(len(counts))))
                used.copies += torch.tensor(counts)
                used.entropies.append(counts.entropy)
                figures[f"{name}/entropy"] = counts.entropy
                figures[f"{name}/imbalance"] = counts.imbalance
            positions = float(stats.weight) * model.shape.context
            log.trained(loss=float(stats.loss), tokens=positions, **figures)
            if log.step == log.steps:
                return


@torch.no_grad()
def perplexity(model: gpt.GPT, loader: sw.Loader) -> float:
    """Return the perplexity per held-out token, over all workers."""
    metrics = sw.Metrics()
    model.eval()
    for tokens, targets in loader:
        metrics.add(n=targets.numel(), loss=gpt.token_loss(model, tokens, targets))
    model.train()
    return float(torch.tensor(float(metrics.compute()["loss"])).exp())


def show(usage: dict[str, Usage], path: Path) -> None:
    """Print the share of tokens of each expert, and draw it next to the entropy of each step."""
    shares = {name: (100 * u.copies / u.copies.sum()).tolist() for name, u in usage.items()}
    experts = len(next(iter(shares.values())))
    table = Table(title="share of token copies per expert, in %", title_justify="left")
    for heading in ("layer", *map(str, range(experts))):
        table.add_column(heading, justify="right")
    for name, each in shares.items():
        table.add_row(name, *(f"{share:.1f}" for share in each))
    from rich.console import Console

    Console().print(table)
    figure, (axes, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    width = 0.8 / len(shares)
    for number, (name, each) in enumerate(shares.items()):
        places = [expert + number * width for expert in range(experts)]
        axes.bar(places, each, width, label=name)
        right.plot(range(1, 1 + len(usage[name].entropies)), usage[name].entropies, label=name)
    axes.axhline(100 / experts, color="0.4", linewidth=1, linestyle="--", label="equal shares")
    axes.set(xlabel="expert", ylabel="share of token copies (%)")
    axes.legend(frameon=False)
    right.set(xlabel="step", ylabel="entropy of shares / log E")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def shared_text(world: sw.World, args: argparse.Namespace) -> corpus.Corpus:
    """Return the corpus, which the main rank makes once and sends to the others."""
    text: corpus.Corpus | corpus.CorpusError | None = None
    if world.is_main:
        try:
            text = corpus.read(args.data, vocabulary=args.vocabulary)
            text.windows(args.context, args.held_out)
        except corpus.CorpusError as error:
            text = error
    text = world.broadcast_object(text)
    if not isinstance(text, corpus.Corpus):
        world.print(f"moe: {text}", file=sys.stderr)
        sys.exit(2)
    return text


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(
        description="A mixture of experts learns Python's standard library, or the text of --data."
    )
    number = "(default %(default)s)"
    parser.add_argument("--experts", type=int, default=8, help=f"experts per layer {number}")
    parser.add_argument("--balance", type=float, default=0.01, help=f"factor of the loss {number}")
    parser.add_argument("--layers", type=int, default=4, help=f"blocks {number}")
    parser.add_argument("--width", type=int, default=128, help=f"numbers per token {number}")
    parser.add_argument("--context", type=int, default=64, help=f"tokens in a window {number}")
    parser.add_argument("--vocabulary", type=int, default=1024, help=f"distinct tokens {number}")
    parser.add_argument("--steps", type=int, default=200, help=f"number of steps {number}")
    parser.add_argument("--batch-size", type=int, default=16, help=f"windows per step {number}")
    parser.add_argument("--lr", type=float, default=2e-3, help=f"learning rate {number}")
    parser.add_argument("--held-out", type=int, default=64, help=f"windows to evaluate {number}")
    parser.add_argument("--data", type=Path, help="text to learn (default: Python's library)")
    parser.add_argument("--out", type=Path, default="runs/moe", help=f"folder {number}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
