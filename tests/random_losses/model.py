"""The models that `tests/system/scripts/survives.py` trains."""

import torch
from torch import Tensor, nn

import shardwise as sw

TOKENS = 9
"""Length of the sequences that `--context` cuts."""


def make_data(kind: str) -> tuple[Tensor, Tensor]:
    """Return 50 rows and their labels, or 50 sequences with `context`."""
    drawn = torch.Generator().manual_seed(5)
    shape = (50, TOKENS) if kind == "context" else (50,)
    rows = torch.randn(*shape, 6, generator=drawn, dtype=torch.float64)
    return rows, torch.randint(0, 3, shape, generator=drawn)


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, tokens, 16)."""
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


def make_model(kind: str) -> nn.Sequential:
    """Return the model that the script trains, with torch's default dtype."""
    torch.manual_seed(4)
    if kind == "context":
        return nn.Sequential(nn.Linear(6, 16), Attention(), nn.Linear(16, 3))
    if kind == "experts":
        experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        router = nn.Linear(16, 4, bias=False)
        mixture = sw.MoE(router, experts, top_k=2, balance=0.05, bias_rate=0.02)
        return nn.Sequential(nn.Linear(6, 16), mixture, nn.Tanh(), nn.Linear(16, 3))
    if kind in ("split", "stages"):
        hidden = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(16, 3))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model[1].eval()
    return model
