"""What is computed between two split layers, as autograd has noted it.

A trial shows that a forward takes to being split, by what it does at that moment. What it does
from some step on, or for some input only, shows in its graph: an operation there that was not
tried, and that may look at several features together, is refused before anything comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError

_BY_FEATURE = frozenset(
    ["Add", "Sub", "Mul", "Div", "Neg", "Tanh", "Relu", "Gelu", "Silu", "Sigmoid", "Exp", "Log",
     "Sqrt", "Rsqrt", "Pow", "Abs", "Clamp", "ClampMin", "ClampMax", "Hardtanh", "Hardswish",
     "Hardsigmoid", "LeakyRelu", "Elu", "Mish", "Softplus", "MaskedFill", "Where", "NativeDropout",
     "FusedDropout", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute",
     "Unsqueeze", "Squeeze", "Clone", "Alias"]
)  # fmt: skip
"""Operations that treat every feature by itself, or move none from where it is."""

_ATTENTION = frozenset(["Bmm", "Softmax", "SafeSoftmax", "Expand", "Baddbmm", "Attention"])
"""What attention is made of, which its kernels do as one."""

_OUTSIDE = "a value from outside"
_MOST = 1000
"""Operations that are looked at."""


def operations(value: Tensor, starts: Sequence[Any]) -> set[str]:
    """What has been computed of the outputs whose nodes are `starts`, up to `value`."""
    first = min(node._sequence_nr() for node in starts)
    ends = set(starts)
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting and len(seen) < _MOST:
        node = waiting.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        name = _plain(node.name())
        found.add(name)
        if name == "AccumulateGrad":
            continue
        if node._sequence_nr() < first:
            found.add(_OUTSIDE)
            continue
        waiting += [after for after, _ in node.next_functions]
    return found


def _plain(name: str) -> str:
    name = re.sub(r"(Backward)?\d*$", "", name.rpartition("::")[2])
    return "Attention" if name.startswith("ScaledDotProduct") else name


class Path:
    """What may be computed before a row-wise layer: `tried`, and what treats features alone."""

    def __init__(self, tried: Iterable[str] = ()) -> None:
        self.tried = set(tried)
        known = self.tried | _BY_FEATURE
        self._known = known | _ATTENTION if "Attention" in known else known

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        """Raise UsageError for a `value` that came about in a way that was not tried."""
        if value.grad_fn is None or not starts or torch._C._current_graph_task_id() != -1:
            return
        if strange := operations(value, starts) - self._known:
            raise UsageError(
                "Between two layers that are split (--tensor), where each worker has a part of "
                f"the features, forward computes {', '.join(sorted(strange))}, which it did not "
                "when the layers were tried at the start: whether it may be done with a part is "
                "not known. Leave them whole, or say that it may: sw.Engine(..., tensor_plan="
                '{"blocks.*.up": "whole"}), or "colwise" and for the second layer "rowwise".'
            )


class Recorded(Path):
    """Notes what is computed, in a trial."""

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        """Note it."""
        if value.grad_fn is not None and starts:
            self.tried |= operations(value, starts)
