"""The time and memory of the last linear layer and its loss, forward and backward.

    python benchmarks/head_loss.py [--tokens 2048] [--features 768] [--classes 50257] [--rounds 5]

`F.cross_entropy` holds all scores. `checkpointed chunks` is the usual way to avoid that: each chunk
of tokens runs in torch.utils.checkpoint, which computes its scores twice.
`sw.chunked_cross_entropy` computes the gradients of a chunk while it has the scores. Each contender
runs in its own process, in turns; the table shows medians over rounds, and the largest memory above
that of the inputs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
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
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only is not None:
        print(json.dumps(_measure(options)))
        return 0
    facts = figure.begin()
    sizes = figure.as_flags(options, ("tokens", "features", "classes", "dtype"))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            command = [sys.executable, __file__, f"--only={name}", *sizes]
            measured[name].append(figure.result_of(command))
    ms = {name: median(run["seconds"] for run in runs) * 1e3 for name, runs in measured.items()}
    mb = {name: median(run["peak"] for run in runs) / figure.MB for name, runs in measured.items()}
    first = next(iter(CONTENDERS))
    rows = [
        [name, figure.milliseconds(ms[name]), f"{ms[name] / ms[first]:.2f}", f"{mb[name]:.0f}"]
        for name in CONTENDERS
    ]
    title = f"{options.tokens:,} tokens, {options.features} x {options.classes:,}, {options.dtype}"
    figure.show(*figure.table([title, "ms", f"x {first}", "peak MB"], rows))
    losses = {name: runs[0]["loss"] for name, runs in measured.items()}
    figure.show("", f"losses: {', '.join(f'{loss:.6f}' for loss in losses.values())}")
    figure.keep(options, facts, ms=ms, mb=mb, losses=losses)
    return 0


def _measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one contender once to warm up, and then three times, and return its figures."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, features, classes = options.tokens, options.features, options.classes
    dtype = DTYPES[options.dtype]
    head = nn.Linear(features, classes, bias=False, dtype=dtype, device=device)
    hidden = torch.randn(tokens, features, dtype=dtype, device=device, requires_grad=True)
    target = torch.randint(classes, (tokens,), device=device)
    before = _peak(device)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        loss = CONTENDERS[options.only](hidden, target, head)
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - begun)
        hidden.grad = head.weight.grad = None
    return {"seconds": median(seconds[1:]), "peak": _peak(device) - before, "loss": value}


def _peak(device: torch.device) -> float:
    """Return the largest number of bytes that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return figure.memory_of_process("VmHWM")


if __name__ == "__main__":
    sys.exit(main())
