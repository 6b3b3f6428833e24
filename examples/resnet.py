"""The throughput of ResNet-34: `shardwise run -n 2 examples/resnet.py --num-steps 10`.

    shardwise run -n 2 examples/resnet.py --num-steps 10
    mpirun -n 2 python examples/resnet.py --num-steps 10
    python examples/resnet.py --num-steps 10 --workers 1,2,4,8     # prints the efficiency table
    shardwise run -n 2 examples/resnet.py --data my/images         # one sub-folder per class

It prints images per second with a confidence interval. Each worker has a batch of fixed size, the
learning rate of Adam is scaled with the number of workers, and the first step is not counted. By
default a worker has 256 images of 256 x 256 on a GPU, and 8 images of 64 x 64 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwise as sw
from helpers import batches
from helpers.screen import Screen
from helpers.sizes import add_flags, run_each
from shardwise.tools.scale.estimates import rate

STAGES = (3, 4, 6, 3)
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
CLASSES = 1000

PUBLISHED = {1: 281.22, 2: 382.01, 4: 689.22, 8: 1341.25}
"""Images per second by number of GPUs (AI training series of the Argonne Leadership Computing
Facility, 2022, Horovod on ThetaGPU)."""


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, channels: int, into: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, into, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(into)
        self.conv_2 = nn.Conv2d(into, into, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(into)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != into:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, into, 1, stride, bias=False), nn.BatchNorm2d(into)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_1(self.conv_1(x)).relu()
        return (self.norm_2(self.conv_2(inner)) + self.shortcut(x)).relu()


class ResNet34(nn.Module):
    """Maps images (rows, 3, height, width) to logits (rows, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.ModuleList()
        channels = 64
        for stage, count in enumerate(STAGES):
            for number in range(count):
                into, stride = 64 << stage, 2 if stage and not number else 1
                self.blocks.append(Block(channels, into, stride))
                channels = into
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Synthetic(Dataset[tuple[Tensor, int]]):
    """`rows` images of noise. It repeats a few images, so that making them takes no time."""

    def __init__(self, rows: int, size: int) -> None:
        self._images = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(0))
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index % len(self._images)], index % CLASSES


class Folder(Dataset[tuple[Tensor, int]]):
    """`rows` images from the sub-folders of `root`, one class each, cropped square to `size`.

    If there are fewer images, they are repeated.
    """

    def __init__(self, root: Path, rows: int, size: int) -> None:
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self._files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self._files:
            raise FileNotFoundError(f"{root} has no sub-folders with images in them")
        self._rows, self._size = rows, size

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._files[index % len(self._files)]
        with Image.open(path) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.convert("RGB").crop((left, top, left + side, top + side))
            pixels = np.asarray(square.resize((self._size, self._size)), np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, label


def main() -> None:
    args = arguments()
    if args.workers:
        show(run_each(__file__, args.workers, sys.argv[1:]))
        return
    world = sw.init(seed=0)
    batches.refuse_batch_per_worker(world, "resnet", "--batch-size is already per worker")
    on_gpu = world.device.type == "cuda"
    each = args.batch_size or (256 if on_gpu else 8)
    size = args.crop or (256 if on_gpu else 64)
    total = each * world.size
    try:
        data = dataset(args, total * (args.num_steps + 1), size)
    except OSError as error:
        world.print(f"resnet: {error}", file=sys.stderr)
        sys.exit(2)
    seconds = train(world, data, total, args)
    mean = rate([total] * len(seconds), seconds)
    world.print(
        f"{world.size} worker(s) x {each} images of {size} x {size}: {mean.value:,.1f} images/s in "
        f"all, {mean.low:,.1f} to {mean.high:,.1f} with 95 % confidence, over {len(seconds)} steps"
    )
    if args.result and world.is_main:
        found = {"rate": mean.value, "low": mean.low, "high": mean.high, "each": each, "size": size}
        args.result.write_text(json.dumps(found))


def dataset(args: argparse.Namespace, rows: int, size: int) -> Synthetic | Folder:
    """Return the images that the flags select. Raises OSError if there is no such folder."""
    return Folder(args.data, rows, size) if args.data else Synthetic(rows, size)


def train(
    world: sw.World, data: Synthetic | Folder, total: int, args: argparse.Namespace
) -> list[float]:
    """Train, and return the slowest rank's seconds of each step except the first."""
    classes = len(data.classes) if isinstance(data, Folder) else CLASSES
    model = ResNet34(classes).to(world.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=sw.lr.factor(world.size) * args.lr)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(data, batch_size=total, num_workers=args.num_workers)
    own = []
    start = time.perf_counter()
    with Screen(world, len(loader)) as screen:
        for step in loader.steps():
            for images, labels in step:
                engine.backward(nn.functional.cross_entropy(model(images), labels))
            stats = engine.step()
            loss = float(stats.loss)  # waits for the device
            now = time.perf_counter()
            own.append(now - start)
            start = now
            screen.stepped(f"loss {loss:.3f} · {total / own[-1]:,.1f} images/s")
    return [max(step) for step in zip(*world.gather(own), strict=True)][1:]


def show(found: dict[int, Any]) -> None:
    """Print the efficiency table, with the published figures in the last columns."""
    run = next(iter(found.values()))
    title = f"ResNet-34, {run['each']} images of {run['size']} x {run['size']} per worker"
    table = Table(title=title, title_justify="left")
    for name in ("workers", "images/s", "95 %", "efficiency"):
        table.add_column(name, justify="right")
    for name in ("published, on GPUs", "efficiency"):
        table.add_column(name, justify="right", style="dim")
    first = min(found)
    for size, run in found.items():
        efficiency = run["rate"] / size / (found[first]["rate"] / first)
        interval = f"{run['low']:,.1f} - {run['high']:,.1f}"
        row = [str(size), f"{run['rate']:,.1f}", interval, f"{efficiency:.0%}"]
        if size in PUBLISHED:
            row += [f"{PUBLISHED[size]:,.1f}", f"{PUBLISHED[size] / PUBLISHED[1] / size:.0%}"]
        table.add_row(*row)
    Console().print(table)


def arguments() -> argparse.Namespace:
    """Parse the flags of this script. `shardwise run` parses the flags of the run."""
    parser = argparse.ArgumentParser(description="The throughput of ResNet-34.")
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    number = "(default %(default)s)"
    parser.add_argument(
        "--num-steps", default=10, help=f"steps to measure, 2 or more {number}", **whole
    )
    parser.add_argument("--batch-size", help="images per worker (default 256, CPU 8)", **whole)
    parser.add_argument("--crop", help="height and width in pixels (default 256, CPU 64)", **whole)
    parser.add_argument("--num-workers", default=0, help=f"DataLoader workers {number}", **whole)
    parser.add_argument("--lr", type=float, default=5e-5, help=f"rate of one worker {number}")
    parser.add_argument("--data", type=Path, metavar="PATH", help="folder with one per class")
    add_flags(parser)
    args = parser.parse_args()
    sizes = [size for size in (args.batch_size, args.crop) if size is not None]
    if args.num_steps < 2 or min(sizes, default=1) < 1:
        parser.error("--num-steps must be 2 or more, and other numbers above 0.")
    return args


if __name__ == "__main__":
    main()
