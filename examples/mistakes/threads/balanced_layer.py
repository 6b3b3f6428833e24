"""A mixture of experts that balances its experts by a bias, with torch only.

A buffer counts the tokens of each expert. Before the optimizer's step, the bias of experts with few
tokens increases (arXiv:2408.15664). Every rank has all experts.
"""

import torch
import torch.distributed as dist
from torch import nn


class BalancedLayer(nn.Module):
    """Mixes the 2 of 4 experts with the highest scores plus bias. Input and output: (rows, width).

    `counts_always` makes the layer count rows in every forward pass. `sums` adds up the counts of
    all ranks in each forward pass.
    """

    def __init__(self, width: int, counts_always: bool = False, sums: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4))
        self.counts_always = counts_always
        self.sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        used = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        if self.training or self.counts_always:
            counts = used.detach().sum(0)
            if self.sums:
                dist.all_reduce(counts)
            self.counts += counts
        gates = scores * used
        return sum(gates[:, e, None] * each(x).tanh() for e, each in enumerate(self.experts))

    @torch.no_grad()
    def update_bias(self, sums: bool = True) -> None:
        """Update the bias, and clear the counts. `sums` adds up the counts of all ranks."""
        if sums:
            dist.all_reduce(self.counts)
        self.bias += 0.02 * (self.counts.mean() - self.counts).sign()
        self.counts.zero_()
