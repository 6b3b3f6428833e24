"""Cross entropy over a vocabulary that is split: no rank ever has all scores of a token."""

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
    """torch's cross_entropy of the output of `head`, the model's last linear map.

    scores: (..., classes), as they came out of `head`; target: (...) int64. Where `tensor_plan`
    splits the head "colwise", scores have this rank's classes only, and ranks exchange three
    numbers for each token (Megatron-LM, Shoeybi et al., 2019); where it is whole, or gathers its
    output, this is torch's own. The result is the same on all ranks of a replica; 16-bit scores are
    summed in fp32.

    Raises UsageError for scores that are not as wide as the output of `head`, or an unknown
    reduction; IndexError for a target that is no class.
    """
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
        raise UsageError(f"reduction takes one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
    if not _gives_local_scores(head):
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
            f"cross_entropy takes scores as the head gave them, {end - first} in the last "
            f"dimension, not {tuple(scores.shape)}."
        )
    head._replica.close_region()  # the split region that the head has begun ends here
    flat, wanted = scores.flatten(0, -2), target.flatten()
    counts = wanted != ignore_index
    wanted = wanted.masked_fill(~counts, 0)
    check_in_range(wanted, ranges[-1][1], "Target out of bounds")
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat.float() if flat.dtype in NARROW else flat, wanted, first, group
    )
    losses = losses.masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses.view(target.shape)  # type: ignore[no-any-return]
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()  # type: ignore[no-any-return]


def _gives_local_scores(head: nn.Module) -> bool:
    """Whether the output of `head` is split at present."""
    return (
        isinstance(head, ColwiseParallel) and not head._gather_output and not head._replica.is_whole
    )


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token from this rank's scores, the first of which is of class `first`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, first: int, group: Collectives) -> Tensor:
        own = target - first
        elsewhere = (own < 0) | (own >= scores.shape[-1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        highest = scores.amax(-1)
        powers = (scores - highest.unsqueeze(-1)).exp_()
        mine = scores.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)
        own_terms = torch.stack([highest, powers.sum(-1), mine])
        gathered = torch.stack(all_gather_tensors(own_terms, group, [own_terms.shape] * group.size))
        top = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - top).exp()).sum(0)
        ctx.save_for_backward(powers.mul_(((highest - top).exp() / total).unsqueeze(-1)))
        ctx.own, ctx.elsewhere = own, elsewhere
        return total.log() + top - gathered[:, 2].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (chances,) = ctx.saved_tensors
        hits = (~ctx.elsewhere).to(chances.dtype).unsqueeze(-1)
        slope = chances.scatter_add(-1, ctx.own, -hits)
        return slope.mul_(grad.unsqueeze(-1)), None, None, None
