"""The time and memory of the last linear layer and its loss, forward and backward.

    python benchmarks/head_loss.py [--tokens 2048] [--features 768] [--classes 50257] [--rounds 5]

`F.cross_entropy` holds all scores. `checkpointed chunks` is the usual way to avoid that: each chunk
of tokens runs in torch.utils.checkpoint, which computes its scores twice.
`sw.chunked_cross_entropy` computes the gradients of a chunk while it has the scores. Each contender
runs in its own process, in turns; the table shows medians over rounds, and the largest memory above
that of the inputs.
"""

import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import figure
import shardwise as sw

CHUNK = 256
"""Tokens per chunk, about as many as `sw.chunked_cross_entropy` chooses at the default sizes."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def whole(hidden: Tensor, target: Tensor, head: nn.Linear) -> Tensor:
    """Compute all scores, and then the loss."""
    return F.cross_entropy(head(hidden).float(), target)


def checkpointed(hidden: Tensor, target: Tensor, head: nn.Linear) -> Tensor:
    """Compute the scores of each chunk in the forward and again in the backward."""

    def total(part: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(part).float(), labels, reduction="sum")

    parts = zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    sums = [checkpoint(total, part, labels, use_reentrant=False) for part, labels in parts]
    return torch.stack(sums).sum() / len(target)


CONTENDERS = {
    "F.cross_entropy": whole,
    "checkpointed chunks": checkpointed,
    "sw.chunked_cross_entropy": sw.chunked_cross_entropy,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contenders in turns and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"tokens": 2048, "features": 768, "classes": 50257, "rounds": 5})
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    sizes = options.tokens, options.features, options.classes, options.dtype
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            measured[name].append(_in_new_process(name, sizes))
    ms = {name: median(row[0] for row in rows) * 1e3 for name, rows in measured.items()}
    mb = {name: median(row[1] for row in rows) / figure.MB for name, rows in measured.items()}
    first = next(iter(CONTENDERS))
    rows = [
        [name, figure.milliseconds(ms[name]), f"{ms[name] / ms[first]:.2f}", f"{mb[name]:.0f}"]
        for name in CONTENDERS
    ]
    title = f"{options.tokens:,} tokens, {options.features} x {options.classes:,}, {options.dtype}"
    figure.show(*figure.table([title, "ms", f"x {first}", "peak MB"], rows))
    losses = {name: rows[0][2] for name, rows in measured.items()}
    figure.show("", f"losses: {', '.join(f'{loss:.6f}' for loss in losses.values())}")
    figure.keep(options, facts, ms=ms, mb=mb, losses=losses)
    return 0


def _in_new_process(name: str, sizes: tuple[int, int, int, str]) -> tuple[float, float, float]:
    """Return the seconds, the peak bytes and the loss of one contender."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(name, sizes, sender))
    process.start()
    sender.close()
    found: tuple[float, float, float] = receiver.recv()
    process.join()
    return found


def _measure(name: str, sizes: tuple[int, int, int, str], sender: Connection) -> None:
    """Run a contender once to warm up, and then three times; send the median and the peak."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, features, classes, dtype = sizes
    head = nn.Linear(features, classes, bias=False, dtype=DTYPES[dtype], device=device)
    hidden = torch.randn(tokens, features, dtype=DTYPES[dtype], device=device, requires_grad=True)
    target = torch.randint(classes, (tokens,), device=device)
    before = _peak(device)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        loss = CONTENDERS[name](hidden, target, head)
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - begun)
        hidden.grad = head.weight.grad = None
    sender.send((median(seconds[1:]), _peak(device) - before, value))


def _peak(device: torch.device) -> float:
    """Return the largest number of bytes that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.exit(main())
