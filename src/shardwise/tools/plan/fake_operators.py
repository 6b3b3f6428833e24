"""Computes the output shapes of operators that support real CPU tensors but not fake tensors."""

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
    """Return an empty result of `aten._grouped_mm`, which multiplies groups of rows.

    Mixture-of-experts layers use it, with one group per expert. `offs` contains the end index of
    each group, shape (groups,). Either operand may be divided into groups.
    """
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
    """Return empty results of an fp32 LSTM layer: output, states, and the saved workspace.

    torch's own fake implementation saves nothing for the backward pass. Every real implementation
    saves the four gates and cell state of each step, and the initial cell state. The rest of
    oneDNN's workspace is not included, because its size depends on the kernel for this CPU.
    """
    del weight0, weight1, weight2, weight3, reverse, sizes, mode, rest
    length, batch, _ = source.shape
    output = source.new_empty(length, batch, hidden)
    gates_and_cells = source.new_empty(4 * length + length + 1, batch, hidden)
    return output, hx.clone(), cx.clone(), gates_and_cells


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_mm,
    aten.mkldnn_rnn_layer.default: rnn_layer,
}
"""Maps operators to functions that return an empty result of the correct shape."""
