"""Trains on islands and saves each rank's state after each boundary. One island dies.

FOLDER/anchor-S-RANK.pt contains the anchor after step S. Each rank prints the losses of its steps.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import save_tensors
from shardwise.checkpoint.loader import CheckpointLoader

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=3, help="number of epochs, of 8 steps each")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--die", default="", help="RANK:STEP at which it dies, once")
parser.add_argument("--signal", type=int, default=signal.SIGKILL, help="signal that kills it")
parser.add_argument("--in-save", action="store_true", help="die in a save")
parser.add_argument("--hold", type=int, default=0, help="wait at this step for its return")
parser.add_argument("--save", type=int, default=1000, help="save every K steps")
parser.add_argument("--measure", action="store_true", help="compute the loss over all ranks")
parser.add_argument("--common", action="store_true", help="draw and broadcast in each step")
parser.add_argument("--share", action="store_true", help="no Loader; draw before each batch")
parser.add_argument("--slow-load", type=float, default=0.0, help="seconds of a load after a return")
parser.add_argument("--width", type=int, default=40, help="width of the hidden layer")
args = parser.parse_args()

world = sw.init(seed=0, device="cpu", quiet=True)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, args.width), nn.Tanh(), nn.Linear(args.width, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
engine = sw.Engine(model, optimizer)
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
loader = sw.Loader(list(rows), 8)
engine.track(loader=loader, scheduler=scheduler)
if world.collectives.is_outside:
    (args.folder / "comes back").touch()


def load(*given: Any, **more: Any) -> Any:
    """Load a checkpoint, slowly if requested."""
    if args.slow_load and world.collectives.is_outside:
        print("loads", flush=True)
        time.sleep(args.slow_load)
    return plain_load(*given, **more)


plain_load, CheckpointLoader.load = CheckpointLoader.load, load
engine.resume(args.folder)
print(f"start {engine.steps}", flush=True)


def dies() -> None:
    """Die once, if requested."""
    mark = args.folder / "died"
    if f"{world.rank}:{engine.steps}" == args.die and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), args.signal)


def lend(*given: Any) -> Any:
    """Write this rank's part of a checkpoint."""
    if args.in_save:
        dies()
    return plain_lend(*given)


plain_lend, save_tensors.lend = save_tensors.lend, lend


def keep_anchor() -> None:
    """Save the anchor of this rank."""
    with engine.anchor(), engine.full_parameters():
        flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    path = args.folder / f"anchor-{engine.steps}-{world.rank}.pt"
    torch.save(flat, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def hold() -> None:
    """Wait until the dead island is about to ask for admission."""
    while engine.steps == args.hold and not (args.folder / "comes back").exists():
        time.sleep(0.02)
    time.sleep(0.5 if args.hold and engine.steps == args.hold else args.pause)


def draw() -> float:
    """Draw the numbers that all ranks draw."""
    with world.alike():
        return torch.rand(1).item()


def batches() -> Iterator[tuple[Tensor, float]]:
    """Yield batches and the numbers drawn for them.

    With a Loader they are drawn after it gave the batch, else before. A returning island must draw
    them too.
    """
    while args.share and engine.steps < 8 * args.epochs:
        drawn = draw()
        yield world.share(rows[engine.steps * 8 % 64 :][:8]), drawn
    for _ in loader.epochs(0 if args.share else args.epochs):
        for x in loader:
            yield x, draw() if args.common else 0.0


metrics = sw.Metrics()
for x, drawn in batches():
    if not args.in_save:
        dies()
    if args.common:
        assert world.broadcast_object((engine.steps, drawn)) == (engine.steps, drawn)
    loss = (model(x) - x[:, :3].sin()).square().mean()
    engine.backward(loss)
    stats = engine.step()
    scheduler.step()
    print(f"step {engine.steps} {stats.loss:.15e}", flush=True)
    hold()
    if engine.steps % engine._spec.settings.equal_every == 0:
        keep_anchor()
    if args.measure:
        metrics.add(loss=loss)
        world.print(f"mean {engine.steps} {metrics.compute()['loss']:.15e}", flush=True)
    if engine.steps % args.save == 0:
        engine.save(args.folder, keep=2, background=True)

engine.close()
flat = torch.cat([each.detach().flatten() for each in model.parameters()])
torch.save(flat, args.folder / f"end-{world.rank}.pt")
