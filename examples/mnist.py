"""Handwritten digits on more and more workers, the rate scaled with them, with and without warm-up.

    python examples/mnist.py --workers 1,2,4,8                   # all of it: every PDF
    python examples/mnist.py --workers 1,2,4,8 --data my/mnist   # MNIST or Fashion-MNIST files
    shardwise run -n 4 examples/mnist.py                         # one size: accuracy_4.pdf
    mpirun -n 4 python examples/mnist.py

Each worker has a batch of its own size, so that the total batch grows with their number, and the
learning rate with it. Into --out go accuracy_1.pdf ... accuracy_8.pdf (training and validation
accuracy by epoch) and, of several sizes, warmup.pdf.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwise as sw
from helpers import accuracy, batches, images
from helpers.screen import Screen
from helpers.sizes import add_flags, run_each


class Network(nn.Module):
    """Two convolutions and two linear layers: images (rows, 1, height, height) to 10 logits."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classify = nn.Sequential(
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) ** 2, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def main() -> None:
    args = arguments()
    if args.workers:
        found = run_each(__file__, args.workers, sys.argv[1:])
        accuracy.draw_warmup(found, args.out / "warmup.pdf")
        show(args, found)
        return
    world = sw.init(seed=0)
    batches.refuse_those_of_each(world, "mnist", "--batch-size is of each worker already")
    try:
        data = images.read(args.data) if args.data else images.digits()
    except images.ImagesError as error:
        world.print(f"mnist: {error}", file=sys.stderr)
        sys.exit(2)
    each = args.batch_size or (32 if args.data is None else 256)
    steps = args.epochs * -(-len(data.training) // (each * world.size))
    warmup = reaching(args.warmup_epochs, args.epochs)
    if warmup < args.warmup_epochs and world.size > 1:
        world.print(
            f"mnist: a warm-up of {args.warmup_epochs:g} epochs would never reach the full rate "
            f"in {args.epochs}: it is shortened to {warmup:g}. Give more --epochs, or fewer "
            "--warmup-epochs."
        )
    # Alone there is nothing to warm up to: both are the same.
    ways = {"warm-up": warmup} | ({} if world.size == 1 else {"none": 0.0})
    with Screen(world, steps * len(ways)) as screen:
        curves = {
            way: train(world, data, args, screen, total=each * world.size, warmup=epochs)
            for way, epochs in ways.items()
        }
    found_here = {"data": data.name, "batch": each * world.size, "curves": curves}
    if world.is_main:
        path = args.out / f"accuracy_{world.size}.pdf"
        accuracy.draw(curves["warm-up"], path, workers=world.size, data=data.name)
        print(f"{path}: validation accuracy {curves['warm-up']['validation'][-1]:.2%}")
        if args.result:
            args.result.write_text(json.dumps(found_here))


def reaching(warmup: float, epochs: int) -> float:
    """`warmup`, or half of the run where that takes all of its epochs."""
    return warmup if warmup < epochs else epochs / 2


def train(
    world: sw.World,
    data: images.Images,
    args: argparse.Namespace,
    screen: Screen,
    *,
    total: int,
    warmup: float,
) -> dict[str, list[float]]:
    """Accuracies after each epoch, of training (as it goes) and validation, and seconds taken."""
    torch.manual_seed(0)  # every training starts from the same weights
    model = Network(data.height).to(world.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(data.training, batch_size=total, shuffle=True)
    held_out = sw.Loader(data.validation, batch_size=max(256, world.size))
    scheduler = sw.lr.ScaledLR(
        optimizer, steps_per_epoch=len(loader), scaling=args.scaling, warmup_epochs=warmup
    )
    curves: dict[str, list[float]] = {"training": [], "validation": [], "seconds": []}
    for epoch in loader.epochs(args.epochs):
        start = time.perf_counter()
        metrics = sw.Metrics()
        for step in loader.steps():
            for x, y in step:
                out = model(x)
                engine.backward(nn.functional.cross_entropy(out, y))
                metrics.add(accuracy=hits(out, y))
            stats = engine.step()
            scheduler.step()
            screen.stepped(f"loss {float(stats.loss):.3f} · lr {scheduler.get_last_lr()[0]:.1e}")
        curves["training"].append(metrics.compute()["accuracy"])
        curves["seconds"].append(time.perf_counter() - start)
        curves["validation"].append(validate(model, held_out))
        screen.say(
            f"epoch {epoch + 1:>2}/{args.epochs} · warm-up {warmup:g} · accuracy: "
            f"training {curves['training'][-1]:.2%}, validation {curves['validation'][-1]:.2%}"
        )
    engine.close()
    return curves


def validate(model: nn.Module, loader: sw.Loader) -> float:
    """The accuracy on every held-out image once, over all workers."""
    metrics = sw.Metrics()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            metrics.add(accuracy=hits(model(x), y))
    model.train()
    return metrics.compute()["accuracy"]


def hits(out: Tensor, labels: Tensor) -> Tensor:
    """The share of rows whose largest logit is that of the label."""
    return (out.argmax(1) == labels).float().mean()


def show(args: argparse.Namespace, found: dict[int, Any]) -> None:
    """Print the table of all sizes, and where the plots are."""
    table = Table(title=next(iter(found.values()))["data"], title_justify="left")
    for name in ("workers", "total batch", "s/epoch", "training", "validation", "no warm-up"):
        table.add_column(name, justify="right")
    for size, run in found.items():
        warm, cold = run["curves"]["warm-up"], run["curves"].get("none")
        table.add_row(
            str(size),
            str(run["batch"]),
            f"{sorted(warm['seconds'])[len(warm['seconds']) // 2]:.2f}",
            f"{warm['training'][-1]:.2%}",
            f"{warm['validation'][-1]:.2%}",
            f"{cold['validation'][-1]:.2%}" if cold else "",
        )
    console = Console()
    console.print(table)
    names = [f"accuracy_{size}.pdf" for size in found]
    console.print(f"in {args.out}: {', '.join(names)} and warmup.pdf", soft_wrap=True)


def arguments() -> argparse.Namespace:
    """The flags of this script; those of the run belong to `shardwise run`."""
    parser = argparse.ArgumentParser(description="Digits on more and more workers.")
    parser.add_argument("--data", type=Path, metavar="PATH", help="MNIST's four IDX files")
    parser.add_argument("--epochs", type=int, default=16, help="%(default)s")
    parser.add_argument("--batch-size", type=int, metavar="N", help="of EACH worker: 256, or 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="of one worker: %(default)s")
    parser.add_argument("--scaling", choices=sw.lr.SCALINGS, default="linear", help="%(default)s")
    parser.add_argument("--warmup-epochs", type=float, default=5.0, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist"), help="%(default)s")
    add_flags(parser)
    args = parser.parse_args()
    each = 1 if args.batch_size is None else args.batch_size
    if min(args.epochs, each) < 1 or args.lr <= 0 or args.warmup_epochs < 0:
        parser.error("--epochs, --batch-size and --lr take numbers above 0.")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
