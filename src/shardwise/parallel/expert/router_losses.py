"""Computes the router losses over the whole batch, and adds their gradients inside the graph.

With T tokens, E experts and k experts per token, the load-balancing loss (Fedus et al.,
arXiv:2101.03961, in the global-batch form of arXiv:2501.11873) is

    balance x E x sum_i f_i P_i      f_i = counts_i / (k T), without a gradient
                                     P_i = mean probability of expert i

It is not a mean over tokens, because f_i depends on all tokens. But it is linear in P_i, so each
rank uses the counts of all ranks and adds the part for its own tokens:

    balance x E x sum_i f_i (sum over own tokens of p_i) / T

Summed over all ranks, these parts equal the loss of one process with the same micro-batch. This
also holds for the z-loss (Zoph et al., arXiv:2202.08906), z_loss x mean(logsumexp(logits)^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.parallel.expert.routing import Routing
from shardwise.parallel.expert.routing_run import RoutingRun


def loss_factors(everyone: Sequence[int], top_k: int, dtype: torch.dtype) -> Tensor:
    """Return the factors of the router losses: f_i for each expert, then 1 / T, as (E + 1,).

    Args:
        everyone: The number of token copies per expert on all ranks, then the number T of tokens.
        top_k: Number of experts per token.
        dtype: The dtype of the logits.
    """
    *counts, tokens = everyone
    copies = max(tokens * top_k, 1)
    return torch.tensor([*(count / copies for count in counts), 1 / max(tokens, 1)], dtype=dtype)


def router_loss(
    routing: Routing,
    factors: Tensor,
    valid: Tensor | None,
    *,
    balance: float,
    z_loss: float,
) -> Tensor:
    """Return this rank's part of the router losses, a scalar in the dtype of the logits.

    Args:
        routing: The routing of this rank's tokens.
        factors: (E + 1,), as `loss_factors` returns them, on the device of the logits.
        valid: (T,) bool, True for the tokens of this rank that count. None if all count.
        balance: Factor of the load-balancing loss.
        z_loss: Factor of the z-loss.
    """
    probabilities, logits = routing.probabilities, routing.logits
    frequency, share = factors[:-1], factors[-1]
    total = logits.new_zeros(())
    if balance:
        kept = probabilities if valid is None else probabilities * valid.unsqueeze(-1)
        total = total + balance * logits.shape[1] * share * (frequency * kept.sum(0)).sum()
    if z_loss:
        squares = logits.logsumexp(-1).square()
        kept = squares if valid is None else squares * valid
        total = total + z_loss * share * kept.sum()
    return total


class _Attach(torch.autograd.Function):
    """Returns `output` unchanged. Its backward pass adds the gradient of `loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        loss: Tensor,
        run: RoutingRun | None,
        seed: float,
        done: Callable[[], None],
    ) -> Tensor:
        ctx.args = run, seed, done
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run, seed, done = ctx.args
        (loss,) = ctx.saved_tensors
        done()
        if run is not None:
            seed = run.loss_seed
            # The experts of other ranks must not receive the gradient of a loss with weight 0,
            # which may be NaN. `where`, because 0 x NaN is NaN.
            if isinstance(run.drops, Tensor):
                grad = torch.where(run.drops, torch.zeros_like(grad), grad)
            elif run.drops:
                grad = torch.zeros_like(grad)
        return grad, torch.ones_like(loss) * seed, None, None, None


def attach(
    output: Tensor,
    loss: Tensor,
    run: RoutingRun | None,
    seed: float,
    done: Callable[[], None],
) -> Tensor:
    """Return `output`, with a backward pass that also computes the gradient of `loss`.

    Args:
        output: The layer's output.
        loss: This rank's part of the router losses, a scalar.
        run: The engine's run, which sets the loss's initial gradient, or None without an engine.
        seed: The loss's initial gradient if `run` is None.
        done: Called by each backward pass that reaches the output.
    """
    return _Attach.apply(output, loss, run, seed, done)  # type: ignore[no-any-return, no-untyped-call]
