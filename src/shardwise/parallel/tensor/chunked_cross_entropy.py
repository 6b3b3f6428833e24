"""Computes the last linear layer and its cross entropy in chunks of tokens.

The scores of a batch, of shape (tokens, classes), are often the largest tensor of a training step.
Here they exist for one chunk at a time. The forward pass computes a chunk's scores and gradients
together, and then discards the scores. The backward pass only scales these gradients. The idea is
from Cut Cross-Entropy (Wijmans et al., 2024) and Liger Kernel (Hsu et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.parallel.tensor.cross_entropy import combine_classes
from shardwise.parallel.tensor.parallel_layers import (
    ColwiseParallel,
    check_in_range,
    on_local_tensors,
)


@dataclass(frozen=True)
class _Loss:
    """The options of a token's loss (see `chunked_cross_entropy`), and this rank's classes."""

    class_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    chunk: int
    classes: int
    """Number of classes over all ranks."""
    first: int = 0
    """The first class whose scores this rank computes."""
    group: Collectives | None = None
    """The ranks that split the classes, or None."""


def chunked_cross_entropy(
    hidden: Tensor,
    target: Tensor,
    head: nn.Module,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Compute `F.cross_entropy(head(hidden), target)` without ever holding all scores.

    The result and the gradients equal the results of the two separate calls up to rounding. The
    call needs memory for the scores of `chunk` tokens, and for one gradient of the head's weight.
    16-bit scores are converted to fp32 before the softmax, and gradients of a 16-bit weight are
    summed over chunks in fp32. If `tensor_plan` splits the head "colwise", each rank computes the
    scores of its own classes, and ranks exchange a few numbers per token.

    Call this where the model would call `head`, in its `forward` or in the training loop. With
    sharded parameters, the head is gathered as for `head(hidden)`. Second derivatives are not
    supported.

    Args:
        hidden: The input of `head`, of shape (..., features).
        target: The target classes, int64 of shape (...).
        head: The last linear layer of the model, an `nn.Linear`.
        class_weight: A factor for the loss of each class, of shape (classes,), like `weight` in
            torch's function.
        ignore_index: Targets with this value are ignored.
        label_smoothing: The fraction of each target that is spread over all classes, from 0 to 1.
        z_loss: Adds `z_loss * logsumexp(scores) ** 2` to the loss of each token (PaLM, Chowdhery et
            al., 2022).
        softcap: Replaces the scores by `softcap * tanh(scores / softcap)` (Gemma 2, 2024).
        reduction: "mean" divides by the number of tokens that are not ignored, or by the sum of
            their class weights. "sum" does not divide.
        chunk: Number of tokens per chunk. By default, the scores of a chunk need about as much
            memory as `hidden`.

    Returns:
        The loss, a scalar in fp32, or in fp64 if `hidden` is.

    Raises:
        UsageError: `head` is not an `nn.Linear`, or an argument is out of range.
        IndexError: A target is not a valid class.

    Example:
        >>> import torch, shardwise as sw
        >>> head = torch.nn.Linear(8, 100)
        >>> hidden, target = torch.randn(2, 5, 8), torch.randint(100, (2, 5))
        >>> loss = sw.chunked_cross_entropy(hidden, target, head)
        >>> scores = head(hidden).flatten(0, 1)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(scores, target.flatten()))
        True
    """
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"chunked_cross_entropy needs the model's last nn.Linear as its head, not a "
            f"{type(head).__name__}. For other heads, write F.cross_entropy(head(hidden), target)."
        )
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"reduction must be mean or sum, not {reduction!r}. For the loss of each token, write "
            "sw.cross_entropy(head(hidden), target, head, reduction='none')."
        )
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing must be from 0 to 1, not {label_smoothing}.")
    if softcap is not None and softcap <= 0:
        raise UsageError(f"softcap must be above 0, not {softcap}.")
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk must be at least 1 token, not {chunk}.")
    if target.shape != hidden.shape[:-1]:
        raise UsageError(
            f"target must have the shape of hidden without its last dimension, "
            f"{tuple(hidden.shape[:-1])}, not {tuple(target.shape)}."
        )
    split = head if isinstance(head, ColwiseParallel) and not head._replica.is_whole else None
    classes = int(head.weight.shape[0] if split is None else split.ranges[-1][1])
    if class_weight is not None and class_weight.shape != (classes,):
        raise UsageError(
            f"class_weight must have one number per class, shape ({classes},), not "
            f"{tuple(class_weight.shape)}."
        )
    tokens = target.numel()
    loss = _Loss(
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        chunk=chunk or max(256, tokens * hidden.shape[-1] // classes),
        classes=classes,
    )
    flat = target.flatten()
    is_counted = flat != ignore_index
    # Ignored targets may be out of range, so replace them with a valid class.
    flat = flat.masked_fill(~is_counted, 0)
    check_in_range(flat, classes, "Target out of bounds")
    run = partial(
        _run_chunks, head=head, target=flat, is_counted=is_counted, mean=reduction == "mean"
    )
    # Replace `forward` only: the hooks of `head` gather its parameters, and see its gradients.
    own = vars(head).get("forward")
    if split is None:
        vars(head)["forward"] = partial(run, loss=loss)
    else:
        vars(head)["forward"] = partial(_run_split, head=split, loss=loss, run=run)
    try:
        return head(hidden)  # type: ignore[no-any-return]
    finally:
        if own is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = own


def _run_split(hidden: Tensor, *, head: ColwiseParallel, loss: _Loss, run: Any) -> Tensor:
    """Call `run` with a split head. This rank holds only the classes `head.ranges[rank]`."""
    group = head._replica.group
    loss = replace(loss, first=head.ranges[group.rank][0], group=group)

    def run_local(whole: Tensor) -> Tensor:
        with on_local_tensors():
            return run(whole, loss=loss)  # type: ignore[no-any-return]

    # The backward pass of this input sums the gradients from the classes of all ranks.
    return head._replica.region_input(hidden).run(run_local)


def _run_chunks(
    hidden: Tensor,
    *,
    head: nn.Linear,
    target: Tensor,
    is_counted: Tensor,
    mean: bool,
    loss: _Loss,
) -> Tensor:
    """Return the loss for `hidden`, computed with the current parameters of `head`."""
    flat = hidden.flatten(0, -2)
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    device = flat.device.type
    if torch.is_autocast_enabled(device):
        # Cast here, because autocast would cast the weight again for each chunk. The casts are part
        # of the graph, so gradients arrive in the parameters' dtype.
        narrow = torch.get_autocast_dtype(device)
        flat, weight = flat.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    exact = torch.float64 if flat.dtype == torch.float64 else torch.float32
    factors = is_counted.to(exact)
    if loss.class_weight is not None:
        factors = factors * loss.class_weight.to(exact)[target]
    total = factors.sum()
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
            flat, weight, bias, target, is_counted, total, loss, mean
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes both the loss and its gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        is_counted: Tensor,
        total: Tensor,
        loss: _Loss,
        mean: bool,
    ) -> Tensor:
        # hidden: (tokens, features); weight: (classes of this rank, features); target: (tokens,).
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = total.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        value = total.new_zeros(())
        for first in range(0, len(hidden), loss.chunk):
            rows = slice(first, first + loss.chunk)
            is_ignored = ~is_counted[rows]
            scores = F.linear(hidden[rows], weight, bias).to(wide)
            losses, grad = _losses_and_gradients(
                scores, target[rows], loss, any(ctx.needs_input_grad)
            )
            value += losses.masked_fill(is_ignored, 0.0).sum()
            if grad is None:
                continue
            # These are gradients of the sum. The mean of a large batch has gradients that fp16
            # cannot represent before they are multiplied by the loss scale.
            grad.masked_fill_(is_ignored.unsqueeze(-1), 0.0)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None and wide == weight.dtype:
                grad_weight.addmm_(grad.t(), hidden[rows])
            elif grad_weight is not None:
                grad_weight += torch.mm(grad.t(), hidden[rows])
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        # The engine reads the next three from the graph to weight the loss.
        ctx.items, ctx.tokens, ctx.is_mean = total, len(hidden), mean
        return value / total if mean else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through chunked_cross_entropy a second time. Its gradients "
                "were freed by the first backward pass. Compute the loss again."
            )
        gradients, ctx.gradients = ctx.gradients, None
        # If all tokens are ignored, the loss is NaN and the gradients are 0, as in torch.
        scale = torch.where(ctx.items == 0, 0.0, grad / ctx.items) if ctx.is_mean else grad
        scaled = (
            None if g is None else g.to(scale.dtype).mul_(scale).to(dtype)
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, *[None] * 5


def _losses_and_gradients(
    scores: Tensor, target: Tensor, loss: _Loss, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each token, and its gradient with respect to `scores`.

    Args:
        scores: Scores of this rank's classes, (tokens, classes of this rank), in fp32 or fp64. They
            are overwritten.
        target: (tokens,) classes.
        loss: The options of the loss.
        needs_gradient: False to return None instead of the gradient.
    """
    local = target - loss.first
    elsewhere = (local < 0) | (local >= scores.shape[-1])
    local = local.masked_fill_(elsewhere, 0).unsqueeze(-1)
    slope = None
    if loss.softcap is not None:
        scores = scores.div_(loss.softcap).tanh_()
        slope = 1 - scores.square() if needs_gradient else None
        scores = scores.mul_(loss.softcap)
    smoothing = loss.label_smoothing
    weight = None if loss.class_weight is None else loss.class_weight.to(scores.dtype)
    here = None if weight is None else weight[loss.first : loss.first + scores.shape[-1]]
    target_scores = scores.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
    zero = scores.new_zeros(())
    spread_scores = zero
    if smoothing:
        spread_scores = scores.sum(-1) if here is None else scores @ here
    # Log-sum-exp in two steps: first with this rank's maximum, then rescaled to the global one.
    highest = scores.amax(-1)
    powers = scores.sub_(highest.unsqueeze(-1)).exp_()
    sums, top = powers.sum(-1), highest
    classes = loss.classes
    if loss.group is not None:
        top, sums, target_scores, spread_scores = combine_classes(
            loss.group, highest, sums, target_scores, spread_scores.expand_as(sums)
        )
    log_sum = sums.log() + top
    own_weight = 1.0 if weight is None else weight[target]
    losses = (1 - smoothing) * own_weight * (log_sum - target_scores)
    all_weights: Any = classes if weight is None else weight.sum()
    if smoothing:
        losses = losses + smoothing / classes * (all_weights * log_sum - spread_scores)
    if loss.z_loss:
        losses = losses + loss.z_loss * log_sum.square()
    if not needs_gradient:
        return losses, None
    # The gradient of log_sum is the softmax p. The gradients of the scores are constants:
    #   p * ((1 - smoothing) * w[target] + smoothing / classes * sum(w) + 2 * z_loss * log_sum)
    #   - (1 - smoothing) * w[target] at the target - smoothing / classes * w everywhere.
    factor = (1 - smoothing) * own_weight + 2 * loss.z_loss * log_sum
    if smoothing:
        factor = factor + smoothing / classes * all_weights
    grad = powers.mul_((factor * (highest - top).exp() / sums).unsqueeze(-1))
    at_target = (1 - smoothing) * own_weight * (~elsewhere).to(grad.dtype)
    grad.scatter_add_(-1, local, -at_target.unsqueeze(-1))
    if smoothing:
        grad -= smoothing / classes * (1.0 if here is None else here)
    return losses, grad if slope is None else grad.mul_(slope)
