"""Says what kernels of a CPU take beside tensors: buffers of matrix products, copies in other
orders of memory.

Nothing here is fitted to a model whose memory is reported; the sources are

- MKL packs panels of both matrices of a product into a buffer of each thread, k in pieces (Goto
  and van de Geijn, 2008, say why). It keeps a buffer when the product is done, and takes it for a
  later one that needs no more (MKL_FreeBuffers in its reference). The sizes are those that it asked
  malloc for, and those by which processes grew, in products of torch 2.13 with MKL 2024.2, on 1 and
  2 threads: a buffer is longer than what a short k, or few rows, make of it.
- oneDNN convolves channels in blocks of 16 (with AVX-512), into and out of which each tensor is
  brought but an input of at most 3 channels (`is_1stconv` in its source): ONEDNN_VERBOSE=2 prints
  each. It makes machine code for each shape: `benchmarks/plan_kernels.py` measures how much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.tools.plan.record import Operation

SHORT, LONG = 128, 192
"""Elements of k for which a buffer has room at least, and that are packed at once at most."""

COLUMNS = 6410
"""Columns of the right matrix that are packed at once, at most."""

ROWS, MORE = 768, 22
"""Rows of the left matrix that a buffer has room for, at most, and rows of room beside."""

LANES, PLAIN = 16, 3
"""Channels of a block, and those of an input that is read as it is, at most."""

GROUPED = "_grouped_mm"
PRODUCTS = ("mm", "addmm", GROUPED)
"""The operators that MKL computes in fp32 and fp64, one product at a time."""

LSTM = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
CODE = {"convolution": 100_000, "convolution_backward": 200_000} | dict.fromkeys(LSTM, 180_000)
"""Bytes of machine code for a new shape, by operator."""

FIRST_LSTM, FIRST_CONVOLUTION = 3_500_000, 100_000
"""Bytes for the first LSTM and the first convolution of a process."""

WIDTHS = {"float32": 4, "float64": 8}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ProductBuffer:
    """Bytes of the buffer of one thread for a matrix product: its length, and what is touched."""

    length: int = 0
    touched: int = 0


def product_buffers(operations: Iterable[Operation], threads: int) -> int:
    """Bytes that products leave behind: a new buffer wherever one needs more than all before it,
    and of each the part that some product has touched.

    Of the groups of rows that a router makes, whose lengths are not known, the n-th of a shape is
    taken to be longer than all before with the chance of 1 / n.
    """
    left, last = 0.0, ProductBuffer()
    met: Counter[ProductBuffer] = Counter()
    for operation in operations:
        needed, groups = product_buffer(operation, threads), _groups(operation)
        if needed.length > last.length:
            left, last = left + last.touched, needed
        elif needed.touched > last.touched:
            last = ProductBuffer(last.length, needed.touched)
        if groups > 1 and needed == last:
            first = max(met[needed], 1)
            met[needed] += groups
            left += needed.touched * sum(1 / n for n in range(first + 1, met[needed] + 1))
    return round((left + last.touched) * threads)


def _groups(operation: Operation) -> int:
    """How many products an operation is: one for each expert of a mixture."""
    if operation.name != GROUPED or len(operation.shapes) < 2:
        return 1
    shape = max(operation.shapes[:2], key=len)
    return shape[0] if len(shape) == 3 else 1


def product_buffer(operation: Operation, threads: int) -> ProductBuffer:
    """The buffer of one of `threads` threads; empty for another operation."""
    width = WIDTHS.get(operation.dtype, 0)
    if operation.name not in PRODUCTS or not width or (shape := _product(operation)) is None:
        return ProductBuffer()
    rows, inner, columns = shape
    if not rows * inner * columns:
        return ProductBuffer()
    packed, share = min(columns, COLUMNS) + MORE, rows // threads
    piece = _piece(inner)
    return ProductBuffer(
        width * max(SHORT, piece) * (packed + min(2 * share, ROWS)),
        width * piece * (packed + min(share, ROWS)),
    )


def _piece(inner: int) -> int:
    """Elements of k that are packed at once: all, a half, or as many as there is room for."""
    if inner <= LONG:
        return inner
    return -(-inner // 2) if inner <= 2 * LONG else LONG


def _product(operation: Operation) -> Shape | None:
    """Rows, inner length and columns of a product: of the last two matrices that it reads, or of
    one of its groups, among which rows are divided evenly."""
    if operation.name == GROUPED:
        left, right = operation.shapes[:2]
        if (len(left), len(right)) != (2, 3):
            return None
        return left[0] // right[0], left[1], right[2]
    matrices = [shape for shape in operation.shapes if len(shape) >= 2][-2:]
    if len(matrices) < 2 or matrices[0][-1] != matrices[1][-2]:
        return None
    return matrices[0][-2], matrices[0][-1], matrices[1][-1]


def copied_bytes(operation: Operation) -> int:
    """The most bytes that a convolution has at once beside what it reads and what it returns."""
    width = WIDTHS.get(operation.dtype, 2)
    if operation.name == "convolution":
        x, weight = operation.shapes[:2]
        return width * _copied_forward(x, weight, operation.result)
    if operation.name == "convolution_backward":
        gradient, x, weight = operation.shapes[:3]
        made = operation.bytes // width - sum(map(math.prod, operation.shapes))
        return width * _copied_backward(gradient, x, weight, made)
    return 0


def _copied_forward(x: Shape, weight: Shape, result: Shape) -> int:
    """Elements: first those of all three in blocks, when the result is not there as it will be;
    then the result both ways."""
    blocked = _blocked(result)
    return max(_read(x) + _blocked_weight(weight) + blocked - math.prod(result), blocked)


def _copied_backward(gradient: Shape, x: Shape, weight: Shape, made: int) -> int:
    """Elements: the gradient of x is made first, and brought into its order; then the weight's."""
    numel = math.prod(weight)
    for_x = 0
    if made >= numel + math.prod(x):
        result = _blocked(x)
        for_x = (
            max(_blocked(gradient) + _blocked_weight(weight) + result - math.prod(x), result)
            - numel
        )
    for_weight = _blocked(gradient) + _read(x) + _blocked_weight(weight) - numel
    return max(0, for_x, for_weight)


def _read(x: Shape) -> int:
    """Elements of the copy in which an input is read."""
    return 0 if x[1] <= PLAIN else _blocked(x)


def _blocked(shape: Shape) -> int:
    """Elements of a tensor whose channels fill blocks."""
    return math.prod(shape) // max(shape[1], 1) * _whole(shape[1])


def _blocked_weight(shape: Shape) -> int:
    return _whole(shape[0]) * _whole(shape[1]) * math.prod(shape[2:])


def _whole(channels: int) -> int:
    """`channels`, filled up to whole blocks."""
    return -(-channels // LANES) * LANES


def code_bytes(operations: Iterable[Operation]) -> int:
    """Bytes of the machine code that oneDNN makes for each shape of an operator, which stays."""
    made = {(each.name, each.shapes) for each in operations if each.name in CODE}
    names = {name for name, _ in made}
    first = FIRST_LSTM * (not names.isdisjoint(LSTM)) + FIRST_CONVOLUTION * bool(names - {*LSTM})
    return first + sum(CODE[name] for name, _ in made)
