"""A feed-forward pair split over ranks: Shardwise beside the same by hand, and torch's DTensor.

    python benchmarks/model_parallel.py [--ranks 2] [--width 512] [--hidden 2048] [--rows 256]

By hand means: each rank has half of both matrices, forward ends with one all-reduce, backward with
another; the plain products between them are all that is left. Ours has hooks, the plan and the
region's bookkeeping on top. One forward and backward of each in turn, many rounds; medians, and the
ratio to the one by hand. "whole" is the same pair on one rank, not split.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import machine
from shardwise.comm import Collectives, Gloo
from shardwise.parallel.tensor import known_modules
from shardwise.parallel.tensor.split_model import TensorParallelModels

Pass = Callable[[], Tensor]


class Pair(nn.Module):
    """What is split."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, width)."""
        return self.down(F.gelu(self.up(x)))


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        ctx.group.all_reduce(total.view(-1)).wait()
        return total, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        group.all_reduce(total.view(-1)).wait()
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    options = _parser().parse_args(arguments)
    console = Console()
    for name, value in machine.describe().items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="model-parallel-") as folder, console.status("..."):
        mp.start_processes(_rank, (options, folder), nprocs=options.ranks)
        several = [torch.load(Path(folder) / f"{r}.pt") for r in range(options.ranks)]
    # A pass has ended when the slowest rank has.
    figures = {
        name: median(map(max, zip(*(each[name] for each in several), strict=True)))
        for name in several[0]
    }
    console.print(_table(figures, options))
    return 0


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    group = Gloo(rank, options.ranks)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.width, generator=draw)
    passes, outputs = _passes(options, group, x), {}
    spans: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(options.repeats + 3):
        for name, run in passes.items():
            group.barrier()
            begun = time.perf_counter()
            outputs[name] = run()
            if number >= 3:
                spans[name].append((time.perf_counter() - begun) * 1e3)
    for name, grad in outputs.items():
        torch.testing.assert_close(grad, outputs["whole"], rtol=1e-3, atol=1e-5, msg=name)
    torch.save(spans, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _passes(options: argparse.Namespace, group: Collectives, x: Tensor) -> dict[str, Pass]:
    """By name, a forward and backward that gives the gradient of `x`."""
    whole, ours, dtensor = (_pair(options) for _ in range(3))
    split = TensorParallelModels(group, torch.device("cpu"))
    split.cut(known_modules.find([ours], [""], group.size, set()), [ours], [])
    found = {
        "whole": _pass(whole, x),
        "by hand, one all-reduce": _pass(_by_hand(_pair(options), group), x),
        "Shardwise": _pass(ours, x),
    }
    if options.hidden % group.size == 0:
        found["torch's DTensor"] = _pass(_by_dtensor(dtensor, group.size), x)
    return found


def _pair(options: argparse.Namespace) -> Pair:
    torch.manual_seed(0)
    return Pair(options.width, options.hidden)


def _pass(forward: Callable[[Tensor], Tensor], x: Tensor) -> Pass:
    def run() -> Tensor:
        taken = x.clone().requires_grad_()
        forward(taken).square().sum().backward()
        assert taken.grad is not None
        return taken.grad

    return run


def _by_hand(pair: Pair, group: Collectives) -> Callable[[Tensor], Tensor]:
    up, bias, down = (
        part.tensor_split(group.size, dim)[group.rank].detach().clone().requires_grad_()
        for part, dim in ((pair.up.weight, 0), (pair.up.bias, 0), (pair.down.weight, 1))
    )
    last = pair.down.bias

    def forward(x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(_Apart.apply(x, group), up, bias))
        return _Together.apply(F.linear(hidden, down), group) + last

    return forward


def _by_dtensor(pair: Pair, ranks: int) -> Callable[[Tensor], Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (ranks,))
    return parallelize_module(pair, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _table(figures: dict[str, float], options: argparse.Namespace) -> Table:
    title = (
        f"{options.rows} rows, {options.width} to {options.hidden} and back, fp32, "
        f"{options.ranks} ranks over Gloo: forward and backward"
    )
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("")
    drawn.add_column("median ms", justify="right")
    drawn.add_column("x by hand", justify="right")
    for name, value in figures.items():
        over = value / figures["by hand, one all-reduce"]
        drawn.add_row(name, f"{value:.2f}", f"{over:.2f}")
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("ranks", 2), ("width", 512), ("hidden", 2048), ("rows", 256)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument("--repeats", type=int, default=60, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
