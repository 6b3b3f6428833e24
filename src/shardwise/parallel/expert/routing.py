"""Selects the experts for each token. The selection is the same on all ranks and in all layouts.

Selection uses fp32 (fp64 if the model does). `torch.topk` breaks ties differently for different
shapes, so a stable sort is used. If two experts have equal scores, the one with the lower index
wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.precision import NARROW

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """The experts selected for T tokens: k of E experts for each token.

    Args:
        experts: (T, k) int64, each token's experts by descending score.
        gates: (T, k), the weights of these experts' outputs.
        probabilities: (T, E), each token's scores divided by their sum.
        logits: (T, E), the output of the router.
    """

    experts: Tensor
    gates: Tensor
    probabilities: Tensor
    logits: Tensor


def router_logits(router: nn.Module, tokens: Tensor) -> Tensor:
    """Return the router's output for `tokens` (T, D) as (T, E), in fp32 or wider.

    A 16-bit matrix product could change which expert wins. A linear router is therefore computed in
    fp32, even inside autocast. Other routers run unchanged.
    """
    wide = torch.float32 if tokens.dtype in NARROW else tokens.dtype
    with torch.autocast(tokens.device.type, enabled=False):
        if type(router) is nn.Linear:
            bias = None if router.bias is None else router.bias.to(wide)
            return F.linear(tokens.to(wide), router.weight.to(wide), bias)
        logits: Tensor = router(tokens)
        return logits.to(wide) if logits.dtype in NARROW else logits


def route(
    logits: Tensor, top_k: int, *, scores: str, normalize: bool, scale: float, bias: Tensor | None
) -> Routing:
    """Select `top_k` experts for each token from `logits` (T, E).

    `bias` (E,) changes which experts are selected, but not their gates (Wang et al.,
    arXiv:2408.15664).
    """
    if scores == "softmax":
        values = probabilities = logits.softmax(-1)
    else:
        values = logits.sigmoid()
        probabilities = values / (values.sum(-1, keepdim=True) + 1e-20)
    with torch.no_grad():
        selected = values if bias is None else values + bias.to(values.dtype)
        # Stable, so that the lower index wins a tie.
        order = torch.sort(selected, dim=-1, descending=True, stable=True).indices
        experts = order[:, :top_k].contiguous()
    gates = values.gather(-1, experts)
    if normalize:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, gates * scale, probabilities, logits)
