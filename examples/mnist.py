"""Digits at several numbers of workers: `python examples/mnist.py --workers 1,2,4,8`.

    python examples/mnist.py --workers 1,2,4,8                   # trains at each size
    python examples/mnist.py --workers 1,2,4,8 --data my/mnist   # MNIST or Fashion-MNIST files
    shardwise run -n 4 examples/mnist.py                         # one size
    mpirun -n 4 python examples/mnist.py

Each worker has a batch of fixed size, so the total batch grows with the number of workers, and the
learning rate is scaled with it, once with a warm-up and once without. It prints the accuracy of
each epoch and a table of all sizes. It writes accuracy_1.pdf ... accuracy_8.pdf (accuracy by epoch)
and, for several sizes, warmup.pdf into runs/mnist.
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
    batches.refuse_batch_per_worker(world, "mnist", "--batch-size is already per worker")
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
            f"in {args.epochs} epochs. It is shortened to {warmup:g}: write more --epochs, or "
            "fewer --warmup-epochs."
        )
    # With one worker the rate is not scaled, so a run without warm-up would be the same.
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
    """Return `warmup`, or half of the epochs if the warm-up would take all of them."""
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
    """Train, and return the training accuracy, validation accuracy and seconds of each epoch."""
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
    """Return the accuracy on all held-out images, over all workers."""
    metrics = sw.Metrics()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            metrics.add(accuracy=hits(model(x), y))
    model.train()
    return metrics.compute()["accuracy"]


def hits(out: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of rows whose largest logit is at the label."""
    return (out.argmax(1) == labels).float().mean()


def show(args: argparse.Namespace, found: dict[int, Any]) -> None:
    """Print the table of all sizes, and the names of the plots."""
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
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="Digits at several numbers of workers.")
    number = "(default %(default)s)"
    parser.add_argument("--data", type=Path, metavar="PATH", help="folder of MNIST's 4 IDX files")
    parser.add_argument("--epochs", type=int, default=16, help=f"number of epochs {number}")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images per worker (default 32, with --data 256)",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help=f"rate of one worker {number}")
    parser.add_argument(
        "--scaling", choices=sw.lr.SCALINGS, default="linear", help=f"scaling of the rate {number}"
    )
    parser.add_argument(
        "--warmup-epochs", type=float, default=5.0, help=f"epochs of the warm-up {number}"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/mnist"), help=f"folder to write {number}"
    )
    add_flags(parser)
    args = parser.parse_args()
    each = 1 if args.batch_size is None else args.batch_size
    if min(args.epochs, each) < 1 or args.lr <= 0 or args.warmup_epochs < 0:
        parser.error("--epochs, --batch-size and --lr must be above 0.")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
