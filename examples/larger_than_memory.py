"""A GPT of 1.5 billion parameters trains in less memory than its weights take.

    shardwise run -n 1 --zero 3 --offload-params nvme:/scratch --offload-optimizer nvme:/scratch \\
        --activations recomputed examples/larger_than_memory.py

fp32 weights, gradients and AdamW's moments of 1.5B parameters are 24 GB. They rest on the disk; a
block's weights are read just before they are used. It learns Python's standard library by bytes.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

import torch
from torch import Tensor

import shardwise as sw
from helpers import gpt


def main() -> None:
    """Build the model without memory, train it, and say what it took."""
    args = arguments()
    world = sw.init(seed=0)
    shape = gpt.Shape(
        vocabulary=256,
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
    )
    started = time.perf_counter()
    with sw.on_meta():
        model = gpt.GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    engine = sw.Engine(model, optimizer)
    engine.describe()
    world.print(f"ready after {time.perf_counter() - started:.0f} s, {resident(world)}")

    for step, (tokens, targets) in enumerate(batches(args)):
        started = time.perf_counter()
        tokens, targets = world.share((tokens, targets))
        engine.backward(gpt.token_loss(model, tokens, targets))
        stats = engine.step(max_norm=1.0)
        seconds = time.perf_counter() - started
        world.print(
            f"step {step}: loss {stats.loss:.4f}, norm {stats.grad_norm:.3f}, {seconds:.0f} s, "
            f"{resident(world)}"
        )


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of the standard library and those that follow each: (batch, context) both."""
    library = sorted(Path(get_path("stdlib")).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in library[:60])))
    draw = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.context - 1, (args.batch_size,), generator=draw)
        windows = torch.stack([text[start : start + args.context + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def resident(world: sw.World) -> str:
    """The largest resident set so far of any worker, in words."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"resident set at most {max(world.gather(peak)) / 1e9:.2f} GB per worker"


def arguments() -> argparse.Namespace:
    """The command line; the default is GPT-2 XL's size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
