"""A GPT with 1.5 billion parameters, in less memory than its weights need. The command:

    shardwise run -n 1 --zero 3 --offload-params nvme:/scratch --offload-optimizer nvme:/scratch \\
        --activations recomputed examples/larger_than_memory.py

The fp32 weights, gradients and AdamW moments of 1.5B parameters have 24 GB. They are stored on the
disk, and the weights of a block are read just before their use. The model learns the bytes of
Python's standard library. It prints the loss, gradient norm, seconds and peak memory of each step.
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
    """Build the model without memory, train it, and print time and memory."""
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
    """Yield bytes of the standard library and the byte after each, both (batch, context)."""
    library = sorted(Path(get_path("stdlib")).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in library[:60])))
    draw = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.context - 1, (args.batch_size,), generator=draw)
        windows = torch.stack([text[start : start + args.context + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def resident(world: sw.World) -> str:
    """Return the peak resident set of all workers, in words."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"resident set at most {max(world.gather(peak)) / 1e9:.2f} GB per worker"


def arguments() -> argparse.Namespace:
    """Parse the flags. The default sizes are those of GPT-2 XL."""
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
