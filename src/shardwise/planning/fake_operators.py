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


STAND_INS: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: grouped_mm}
"""By operator, what gives a result of the right shape."""
