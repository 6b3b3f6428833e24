"""Says what kernels of a CPU take beside tensors: buffers of matrix products, copies in other
orders of memory.

Nothing here is fitted to a model whose memory is reported; the sources are

- MKL packs panels of both matrices of a product into a buffer of each thread, k in blocks (Goto
  and van de Geijn, 2008, say why). It keeps a buffer when the product is done, and takes it for a
  later one that needs no more (MKL_FreeBuffers in its reference). The sizes are those that it asked
  malloc for in products of torch 2.13 with MKL 2024.2, on 1 and 2 threads.
- oneDNN convolves in a blocked order of memory, into and out of which each tensor is brought. It
  makes machine code for each shape: `benchmarks/plan_kernels.py` measures how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardwise.planning.record import Operation

SHORT, LONG = 128, 192
"""Elements of k that are packed at once: of a short k and of a long one."""

COLUMNS = 820_480
"""Elements of the right matrix that are packed at once, at most."""

ROWS, MORE = 768, 22
"""Rows of the left matrix that are packed at once, at most, and rows of room beside."""

PRODUCTS = ("mm", "addmm")
"""The operators that MKL computes in fp32 and fp64, one product at a time."""

LSTM = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
CODE = {"convolution": 100_000, "convolution_backward": 200_000} | dict.fromkeys(LSTM, 180_000)
"""Bytes of machine code for a new shape, by operator."""

FIRST_LSTM, FIRST_CONVOLUTION = 3_500_000, 100_000
"""Bytes for the first LSTM and the first convolution of a process."""

WIDTHS = {"float32": 4, "float64": 8}


def product_buffers(operations: Iterable[Operation], threads: int) -> int:
    """Bytes of the buffers that products leave behind: new ones wherever a product needs more than
    all before it."""
    total = most = 0
    for operation in operations:
        if (needed := buffer_bytes(operation, threads)) > most:
            most = needed
            total += needed
    return total * threads


def buffer_bytes(operation: Operation, threads: int) -> int:
    """Bytes of the buffer of one of `threads` threads for a matrix product; 0 for another
    operation."""
    width = WIDTHS.get(operation.dtype, 0)
    if operation.name not in PRODUCTS or not width or (shape := _product(operation.shapes)) is None:
        return 0
    rows, inner, columns = shape
    block = _block(inner)
    packed = min(columns, COLUMNS // block) + min(2 * rows // threads, ROWS) + MORE
    return width * block * packed if rows * inner * columns else 0


def _block(inner: int) -> int:
    """Elements of k that are packed at once."""
    if inner <= 2 * SHORT:
        return SHORT
    return -(-inner // 16) * 8 if inner <= 2 * LONG else LONG


def _product(shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Rows, inner length and columns of a product: of the last two tensors that it reads."""
    matrices = [shape for shape in shapes if len(shape) >= 2][-2:]
    if len(matrices) < 2 or matrices[0][-1] != matrices[1][-2]:
        return None
    return matrices[0][-2], matrices[0][-1], matrices[1][-1]


def copied_bytes(operation: Operation) -> int:
    """Bytes of what a convolution copies while it runs: what it reads and writes in forward, what
    it reads in backward, whose results come one after the other."""
    if operation.name == "convolution":
        return operation.bytes
    if operation.name == "convolution_backward":
        return WIDTHS.get(operation.dtype, 2) * sum(map(math.prod, operation.shapes[:3]))
    return 0


def code_bytes(operations: Iterable[Operation]) -> int:
    """Bytes of the machine code that oneDNN makes for each shape of an operator, which stays."""
    made = {(each.name, each.shapes) for each in operations if each.name in CODE}
    names = {name for name, _ in made}
    first = FIRST_LSTM * (not names.isdisjoint(LSTM)) + FIRST_CONVOLUTION * bool(names - {*LSTM})
    return first + sum(CODE[name] for name, _ in made)
