"""Checks the operations between two split layers against those that a trial has seen.

A trial shows what a forward computes at that moment. What it computes from some step on, or for
some input only, shows in its autograd graph: an operation there that was not tried, and that may
combine several features, is refused before its result is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError

_FEATURE_WISE = frozenset(
    ["Add", "Sub", "Mul", "Div", "Neg", "Tanh", "Relu", "Gelu", "Silu", "Sigmoid", "Exp", "Log",
     "Sqrt", "Rsqrt", "Pow", "Abs", "Clamp", "ClampMin", "ClampMax", "Hardtanh", "Hardswish",
     "Hardsigmoid", "LeakyRelu", "Elu", "Mish", "Softplus", "MaskedFill", "Where", "NativeDropout",
     "FusedDropout", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute",
     "Unsqueeze", "Squeeze", "Clone", "Alias"]
)  # fmt: skip
"""Operations that treat every feature by itself, or move none from where it is."""

_ATTENTION = frozenset(["Bmm", "Softmax", "SafeSoftmax", "Expand", "Baddbmm", "Attention"])
"""The operations of attention, which its kernels do as one."""

_OUTSIDE = "a value from outside"
_MOST_NODES = 1000
"""The number of graph nodes that are visited at most."""


def operations_between(value: Tensor, starts: Sequence[Any]) -> set[str]:
    """Names of the operations between the nodes `starts` and `value`."""
    first = min(node._sequence_nr() for node in starts)
    ends = set(starts)
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        # "torch::autograd::MulBackward0" becomes "Mul".
        name = re.sub(r"(Backward)?\d*$", "", node.name().rpartition("::")[2])
        if name.startswith("ScaledDotProduct"):  # one name for all of torch's kernels
            name = "Attention"
        found.add(name)
        if name == "AccumulateGrad":
            continue
        if node._sequence_nr() < first:
            found.add(_OUTSIDE)
            continue
        waiting += [after for after, _ in node.next_functions]
    return found


class AllowedOperations:
    """The operations allowed before a row-wise layer: those that were `tried`, and feature-wise
    ones."""

    def __init__(self, tried: Iterable[str] = ()) -> None:
        self.tried = set(tried)
        known = self.tried | _FEATURE_WISE
        self._known = known | _ATTENTION if "Attention" in known else known

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        """Raise UsageError for a `value` that an operation has produced that is not allowed."""
        if value.grad_fn is None or not starts or torch._C._current_graph_task_id() != -1:
            return
        if strange := operations_between(value, starts) - self._known:
            raise UsageError(
                "Between two layers that are split (--tensor), where each worker has a part of "
                f"the features, forward computes {', '.join(sorted(strange))}, which it did not "
                "when the layers were tried at the start: whether it may be done with a part is "
                "not known. Leave them whole, or say that it may: sw.Engine(..., tensor_plan="
                '{"blocks.*.up": "whole"}), or "colwise" and for the second layer "rowwise".'
            )


class RecordedOperations(AllowedOperations):
    """Records the operations of a trial."""

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        """Record the operations that lead to `value`."""
        if value.grad_fn is not None and starts:
            self.tried |= operations_between(value, starts)
