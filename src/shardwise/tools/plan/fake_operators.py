"""Says the shapes of operators that fake tensors refuse on a CPU, though real ones are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `aten._grouped_mm` gives: products of the groups of rows that `offs` ends (experts of a
    mixture), of which either side may be cut into groups."""
    del bias
    groups = [left.shape[0]] if left.ndim == 3 else [right.shape[0]] if right.ndim == 3 else []
    if left.ndim == right.ndim == 2:
        assert offs is not None
        shape = [offs.shape[0], left.shape[0], right.shape[1]]
    elif left.ndim == right.ndim == 3:
        shape = [*groups, left.shape[1], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def rnn_layer(
    source: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    sizes: list[int],
    mode: int,
    hidden: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `aten.mkldnn_rnn_layer` gives: output, both states, and the workspace that its backward
    reads, of which torch's own stand-in says that it is empty."""
    del weight0, weight1, weight2, weight3, reverse, sizes, mode, rest
    length, batch, _ = source.shape
    output = source.new_empty(length, batch, hidden)
    workspace = source.new_empty(lstm_workspace(length, batch, hidden), dtype=torch.uint8)
    return output, hx.clone(), cx.clone(), workspace


def lstm_workspace(length: int, batch: int, hidden: int) -> int:
    """Bytes that forward writes into the workspace of an LSTM layer in fp32: four gates of each
    step, and the cell with the one before the first step. The rest that oneDNN asks for
    (src/cpu/rnn/rnn_utils.cpp: set_workspace_sizes) is not touched: states of input and layer are
    read and written where torch has them, and backward's own sums come later.
    `benchmarks/plan_kernels.py` measures it."""
    return 4 * batch * hidden * (4 * length + length + 1)


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_mm,
    aten.mkldnn_rnn_layer.default: rnn_layer,
}
"""By operator, what gives a result of the right shape."""
