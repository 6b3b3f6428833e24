"""A mixture-of-experts layer as a plain loop, which shares no code with `sw.MoE`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


def expert(width: int, hidden: int) -> nn.Module:
    """Return a feed-forward expert."""
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


def moe(
    width: int = 6, experts: int = 8, hidden: int = 5, shared: bool = True, **options
) -> sw.MoE:
    """Return a layer in fp64."""
    return sw.MoE(
        nn.Linear(width, experts, bias=False),
        nn.ModuleList([expert(width, hidden) for _ in range(experts)]),
        shared=expert(width, hidden) if shared else None,
        **options,
    ).double()


class Loops:
    """Runs layers as plain loops, and adds up their router losses and counts.

    Attributes:
        losses: Sum of the router losses of the forward passes since it was set to 0.
    """

    def __init__(self, layers: list[sw.MoE]) -> None:
        self.losses: Tensor | float = 0.0
        self._counts = {layer: torch.zeros(len(layer.experts)).long() for layer in layers}
        for layer in layers:
            layer.forward = self._forward_of(layer)

    def _forward_of(self, layer: sw.MoE):
        def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
            out, loss, counts = naive(layer, x, mask)
            if torch.is_grad_enabled():
                self.losses = self.losses + loss
                self._counts[layer] += counts
            return out

        return forward

    def finish_step(self) -> None:
        """Update the selection biases, and start counting again."""
        for layer, counts in self._counts.items():
            if layer.selection_bias is not None:
                shares = counts.double()
                layer.selection_bias += layer.bias_rate * torch.sign(shares.mean() - shares)
            counts.zero_()


def naive(layer: sw.MoE, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the router losses, and the counts per expert, token by token."""
    tokens = x.reshape(-1, x.shape[-1])
    counted = torch.ones(len(tokens), dtype=torch.bool) if mask is None else mask.reshape(-1)
    logits = F.linear(tokens, layer.router.weight)
    scores = logits.softmax(-1) if layer.scores == "softmax" else logits.sigmoid()
    bias = 0.0 if layer.selection_bias is None else layer.selection_bias.to(scores)
    experts = len(layer.experts)
    counts = torch.zeros(experts, dtype=torch.int64)
    rows = []
    for t in range(len(tokens)):
        ranked = (scores[t] + bias).detach().tolist()
        best = sorted(range(experts), key=lambda e: (-ranked[e], e))[: layer.top_k]
        total = torch.zeros_like(tokens[t])
        if counted[t]:
            norm = sum(scores[t, e] for e in best) if layer.normalize else 1.0
            for e in best:
                counts[e] += 1
                total = total + layer.scale * scores[t, e] / norm * layer.experts[e](tokens[t])
        rows.append(total)
    out = torch.stack(rows)
    if layer.shared is not None:
        out = out + layer.shared(tokens)
    number = max(int(counted.sum()), 1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    mean = (probabilities * counted.unsqueeze(-1)).sum(0) / number
    loss = layer.balance * experts * (counts.double() / (layer.top_k * number) * mean).sum()
    squares = logits.logsumexp(-1).square() * counted
    loss = loss + layer.z_loss * squares.sum() / number
    return out.view(x.shape), loss, counts
