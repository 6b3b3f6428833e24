"""Tells from its autograd graph whether a loss was summed over the rows of its batch.

The way down from the loss goes through what adds, negates or scales scalars by numbers that are
not small, to the operations that made scalars of tensors. One of these is a sum over the batch if
it is a loss of torch's with reduction="sum", or `.sum()` of a tensor that has a row for each of
the batch's and depends on more than one parameter (a penalty on a weight does not).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

SUM = 2
"""torch's number for reduction="sum" in what a loss's backward keeps."""

SCALING = 0.05
"""A factor of this size or less may be a division by the number of items."""

_PASSED = ("AddBackward", "SubBackward", "NegBackward", "ToCopyBackward", "CloneBackward")


def is_sum(loss: Tensor, rows: int, *, look: bool = True) -> bool:
    """Whether any part of `loss`, a scalar, looks like a sum over `rows` rows of a batch.

    Factors are looked at where autograd keeps them itself (`look`): hooks on what it keeps may
    hand it out once only.
    """
    open_nodes, seen = [loss.grad_fn], set[Any]()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _sums(node, rows):
            return True
        if node.name().startswith(_PASSED) or (look and _scales(node)):
            open_nodes.extend(child for child, _ in node.next_functions)
    return False


def _scales(node: Any) -> bool:
    """Whether `node` multiplies a scalar by a number that hardly is one over the items."""
    if not node.name().startswith("MulBackward"):
        return False
    factors = [node._saved_self, node._saved_other]
    known = [f for f in factors if not isinstance(f, Tensor) or f.numel() == 1]
    numbers = [abs(float(f)) for f in known if f is not None and not _requires_grad(f)]
    return all(number > SCALING for number in numbers)


def _requires_grad(factor: Any) -> bool:
    return isinstance(factor, Tensor) and factor.requires_grad


def _sums(node: Any, rows: int) -> bool:
    """Whether `node` made a scalar by summing over the rows of a batch."""
    if getattr(node, "_saved_reduction", None) == SUM:
        return True
    if node.name() != "SumBackward0" or rows < 2:
        return False
    sizes = tuple(node._saved_self_sym_sizes)
    return bool(sizes) and sizes[0] == rows and _leaves(node) > 1


def _leaves(node: Any) -> int:
    """How many parameters are under `node`; counted up to two."""
    open_nodes, seen, found = [node], set[Any](), 0
    while open_nodes and found < 2:
        one = open_nodes.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        found += hasattr(one, "variable")
        open_nodes.extend(child for child, _ in one.next_functions)
    return found
