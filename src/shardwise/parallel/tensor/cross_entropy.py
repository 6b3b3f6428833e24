"""Computes cross entropy over a split vocabulary. No rank ever holds all scores of a token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.model.precision import NARROW
from shardwise.parallel.tensor.parallel_layers import ColwiseParallel, check_in_range
from shardwise.parallel.tensor.region_collectives import all_gather_tensors

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    scores: Tensor,
    target: Tensor,
    head: nn.Module,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch's cross entropy from the output of `head`, the model's last linear layer.

    If `tensor_plan` splits the head "colwise", each rank has only the scores of its own classes,
    and ranks exchange three numbers per token (Megatron-LM, Shoeybi et al., 2019). Otherwise this
    calls `torch.nn.functional.cross_entropy`. The result is the same on all ranks of a replica.
    16-bit scores are summed in fp32.

    Args:
        scores: The output of `head`, of shape (..., classes), or (..., classes of this rank) if the
            head is split.
        target: The target classes, int64 of shape (...).
        head: The module that computed `scores`.
        ignore_index: Targets with this value are ignored.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or the loss of each token, of shape (...), if `reduction` is "none".

    Raises:
        UsageError: The last dimension of `scores` does not match the output of `head`, or
            `reduction` is unknown.
        IndexError: A target is not a valid class.

    Example:
        >>> import torch, shardwise as sw
        >>> head = torch.nn.Linear(8, 10)
        >>> scores, target = head(torch.randn(2, 5, 8)), torch.randint(10, (2, 5))
        >>> sw.cross_entropy(scores, target, head, reduction="none").shape
        torch.Size([2, 5])
    """
    # Scores that are a stage tensor, or split by tokens, are first handled by their own class.
    if has_torch_function((scores, target)):
        return handle_torch_function(
            cross_entropy,
            (scores, target),
            scores,
            target,
            head,
            ignore_index=ignore_index,
            reduction=reduction,
        )
    if reduction not in _REDUCTIONS:
        raise UsageError(f"reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
    is_split = isinstance(head, ColwiseParallel) and not (
        head._gather_output or head._replica.is_whole
    )
    if not is_split:
        return F.cross_entropy(
            scores.flatten(0, -2),
            target.flatten(),
            ignore_index=ignore_index,
            reduction=reduction,
        ).view(target.shape if reduction == "none" else ())
    assert isinstance(head, ColwiseParallel)
    group, ranges = head._replica.group, head.ranges
    first, end = ranges[group.rank]
    if scores.shape[-1] != end - first:
        raise UsageError(
            "cross_entropy takes the scores exactly as the head returned them, with "
            f"{end - first} values in the last dimension, not {tuple(scores.shape)}."
        )
    head._replica.close_region()  # the head opened it, and no row-wise layer follows
    flat, classes = scores.flatten(0, -2), target.flatten()
    # Ignored targets may be out of range, so replace them with a valid class.
    is_counted = classes != ignore_index
    classes = classes.masked_fill(~is_counted, 0)
    check_in_range(classes, ranges[-1][1], "Target out of bounds")
    # Use fp32, because 16 bits are not enough for a sum of exponentials over a vocabulary.
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat.float() if flat.dtype in NARROW else flat, classes, first, group
    )
    losses = losses.masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses.view(target.shape)  # type: ignore[no-any-return]
    return losses.sum() / is_counted.sum() if reduction == "mean" else losses.sum()  # type: ignore[no-any-return]


def combine_classes(
    group: Collectives, highest: Tensor, total: Tensor, *sums: Tensor
) -> tuple[Tensor, ...]:
    """Combine values that the ranks of `group` computed over their own classes. Collective.

    Args:
        group: The ranks that split the classes.
        highest: (tokens,) largest score of this rank's classes.
        total: (tokens,) sum of exp(score - `highest`) over this rank's classes.
        sums: (tokens,) further values to sum over the ranks.

    Returns:
        `highest` and `total` over all classes, followed by the sum over the ranks of each of
        `sums`.
    """
    own = torch.stack([highest, total, *sums])
    # (ranks, 2 + number of sums, tokens)
    gathered = torch.stack(all_gather_tensors(own, group, [own.shape] * group.size))
    top = gathered[:, 0].amax(0)
    total = (gathered[:, 1] * (gathered[:, 0] - top).exp()).sum(0)
    return top, total, *(gathered[:, 2 + number].sum(0) for number in range(len(sums)))


class _CrossEntropy(torch.autograd.Function):
    """Computes each token's loss. `first` is the first of this rank's classes."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, first: int, group: Collectives) -> Tensor:
        # scores: (tokens, classes of this rank); target: (tokens,).
        local_target = target - first
        elsewhere = (local_target < 0) | (local_target >= scores.shape[-1])
        local_target = local_target.masked_fill(elsewhere, 0).unsqueeze(-1)
        # Log-sum-exp in two steps: first with this rank's maximum, then rescaled to the global one.
        highest = scores.amax(-1)
        powers = (scores - highest.unsqueeze(-1)).exp_()
        target_scores = scores.gather(-1, local_target).squeeze(-1).masked_fill(elsewhere, 0.0)
        top, total, target_scores = combine_classes(group, highest, powers.sum(-1), target_scores)
        # Compute the softmax over the full vocabulary in place, in the memory of `powers`.
        ctx.save_for_backward(powers.mul_(((highest - top).exp() / total).unsqueeze(-1)))
        ctx.local_target, ctx.elsewhere = local_target, elsewhere
        return total.log() + top - target_scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (probabilities,) = ctx.saved_tensors
        # The gradient of a score is its probability, minus 1 for the target.
        is_target = (~ctx.elsewhere).to(probabilities.dtype).unsqueeze(-1)
        grad_scores = probabilities.scatter_add(-1, ctx.local_target, -is_target)
        return grad_scores.mul_(grad.unsqueeze(-1)), None, None, None
