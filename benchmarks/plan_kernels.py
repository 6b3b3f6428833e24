"""Measures what kernels of this CPU keep beside tensors, where `shardwise plan` has a rule for it.

    python benchmarks/plan_kernels.py

Each line is what a process grows by (RssAnon) when a matrix product, a convolution or an LSTM of a
new shape has run forward and backward and its tensors are gone, beside what
tools/plan/cpu_kernels.py says. Shapes of no model whose memory is reported are among them.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from shardwise.tiers.host_memory import MMAP_THRESHOLD
from shardwise.tools.plan.cpu_kernels import (
    CODE,
    FIRST_CONVOLUTION,
    FIRST_LSTM,
    LSTM,
    product_buffer,
)
from shardwise.tools.plan.record import Operation

PRODUCTS = ((96, 200, 700), (640, 640, 640), (900, 1100, 1300), (300, 900, 3500), (70, 500, 9000))
"""Rows, inner length and columns, each asking for a larger buffer than those before."""

CONVOLUTIONS = ((3, 8, 40), (16, 16, 96), (16, 32, 48), (32, 64, 24), (24, 24, 20), (3, 64, 64))
LAYERS = ((4, 2, 16), (8, 4, 32), (64, 8, 64), (16, 8, 64))


def main() -> None:
    """Print a line for each shape."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # freed tensors go back to the system
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads; kB\n| what | measured | rule |")
    print("|---|--:|--:|")
    _product(8, 8, 8)
    for shape in PRODUCTS:
        rows, inner, columns = shape
        shapes = ((rows, inner), (inner, columns))
        operation = Operation("mm", 0, 0, "float32", -1, "forward", "", shapes)
        _print(
            "product",
            shape,
            lambda s=shape: _product(*s),
            threads * product_buffer(operation, threads).touched,
        )
    code = CODE["convolution"] + CODE["convolution_backward"]
    for number, shape in enumerate(CONVOLUTIONS):
        rule = code + (0 if number else FIRST_CONVOLUTION)
        _print("convolution", shape, lambda s=shape: _convolve(*s), rule)
    for number, shape in enumerate(LAYERS):
        rule = sum(CODE[name] for name in LSTM) + (0 if number else FIRST_LSTM)
        _print("LSTM layer", shape, lambda s=shape: _lstm(*s), rule)


def _print(what: str, shape: tuple[int, ...], run: Callable[[], None], rule: int) -> None:
    before = _anonymous()
    run()
    gc.collect()
    name = "x".join(map(str, shape))
    print(f"| {what} {name} | {_anonymous() - before} | {rule / 1e3:.0f} |", flush=True)


def _anonymous() -> int:
    """kB of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _product(rows: int, inner: int, columns: int) -> None:
    torch.mm(torch.ones(rows, inner), torch.ones(inner, columns))


def _convolve(before: int, after: int, side: int) -> None:
    x = torch.ones(2, before, side, side, requires_grad=True)
    F.conv2d(x, torch.ones(after, before, 3, 3, requires_grad=True), padding=1).sum().backward()


def _lstm(length: int, batch: int, width: int) -> None:
    model = torch.nn.LSTM(width, width)
    model(torch.ones(length, batch, width))[0].sum().backward()


if __name__ == "__main__":
    main()
