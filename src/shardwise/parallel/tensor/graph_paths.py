"""Checks the operations between two split layers against the operations that a trial recorded.

A trial records the operations of a single forward pass. Later forward passes may run other
operations, for example after some step or for some inputs. The autograd graph reveals them. An
operation that no trial covered may combine features, so it is rejected and its result is never
used.
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
"""Operations that treat each feature separately, or do not move features."""

_ATTENTION = frozenset(["Bmm", "Softmax", "SafeSoftmax", "Expand", "Baddbmm", "Attention"])
"""Operations of attention. Fused kernels combine them into a single operation."""

_OUTSIDE = "a value from outside"
_MOST_NODES = 1000
"""Maximum number of graph nodes to visit."""


def operations_between(value: Tensor, starts: Sequence[Any]) -> set[str]:
    """Return the names of the operations between the autograd nodes `starts` and `value`."""
    # Autograd numbers nodes in the order of creation.
    first = min(node._sequence_nr() for node in starts)
    ends = set(starts)
    names: set[str] = set()
    seen: set[Any] = set()
    stack: list[Any] = [value.grad_fn]
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        # "torch::autograd::MulBackward0" becomes "Mul".
        name = re.sub(r"(Backward)?\d*$", "", node.name().rpartition("::")[2])
        if name.startswith("ScaledDotProduct"):  # each of torch's kernels has its own name
            name = "Attention"
        names.add(name)
        if name == "AccumulateGrad":
            continue
        # The node is older than the first split layer, so the path leads out of the region.
        if node._sequence_nr() < first:
            names.add(_OUTSIDE)
            continue
        stack += [after for after, _ in node.next_functions]
    return names


class AllowedOperations:
    """The operations that are allowed before a row-wise layer.

    These are feature-wise operations and the operations in `tried`, which a trial recorded.
    """

    def __init__(self, tried: Iterable[str] = ()) -> None:
        self.tried = set(tried)
        known = self.tried | _FEATURE_WISE
        # For some shapes, a fused kernel may later be replaced with its individual operations.
        self._known = known | _ATTENTION if "Attention" in known else known
        self.number = _number(self._known)
        """Stands for the allowed operations in compiled graphs."""

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        """Raise UsageError if an operation between `starts` and `value` is not allowed."""
        # A recomputation during the backward pass repeats a forward pass that was already checked.
        if value.grad_fn is None or not starts or torch._C._current_graph_task_id() != -1:
            return
        if strange := operations_between(value, starts) - self._known:
            raise UsageError(
                "Between two split layers (--tensor), where each worker has only a part of the "
                f"features, forward computes {', '.join(sorted(strange))}, which it did not "
                "compute in the trial call at the start, so it is not known whether this works "
                "on a part of the features. Do not split the layers: sw.Engine(..., tensor_plan="
                '{"blocks.*.up": "whole"}). If it does work, write "colwise" for the first layer '
                'and "rowwise" for the second.'
            )


def split_graph_error() -> UsageError:
    """Return the error for a region that starts in one graph and ends in another, or outside."""
    return UsageError(
        "torch.compile splits the graph between two split layers (--compile with --tensor), so "
        "that their operations cannot be checked. Remove the cause, which "
        "TORCH_LOGS=graph_breaks shows, or start without --compile."
    )


_known_sets: list[set[str]] = []


def _number(known: set[str]) -> int:
    # Blocks of the same class have equal sets, and must have equal numbers to share a graph.
    if known not in _known_sets:
        _known_sets.append(known)
    return _known_sets.index(known)


def by_number(number: int) -> AllowedOperations:
    """Return the allowed operations that `number` stands for."""
    return AllowedOperations(_known_sets[number])


class RecordedOperations(AllowedOperations):
    """Records operations during a trial instead of checking them."""

    def check(self, value: Tensor, starts: Sequence[Any]) -> None:
        if value.grad_fn is not None and starts:
            self.tried |= operations_between(value, starts)
