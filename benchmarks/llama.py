"""A Llama-like model in plain PyTorch: RMSNorm, rotary positions, grouped queries, SwiGLU.

After Touvron et al., 2023 (arXiv:2302.13971 and 2307.09288). The output head is not tied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads import Llama


class Block(nn.Module):
    """Pre-norm attention and SwiGLU: (rows, sequence, width) in and out."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.head_width = size.width // size.heads
        kv_width = self.kv_heads * self.head_width
        self.norm_1 = nn.RMSNorm(size.width, eps=1e-5)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_2 = nn.RMSNorm(size.width, eps=1e-5)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos, sin: (sequence, head width / 2)."""
        y = self.norm_1(x)
        rows, sequence, _ = y.shape
        q = self.query(y).view(rows, sequence, self.heads, -1).transpose(1, 2)
        k = self.key(y).view(rows, sequence, self.kv_heads, -1).transpose(1, 2)
        v = self.value(y).view(rows, sequence, self.kv_heads, -1).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = self.attend(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, sequence, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention: (rows, heads, sequence, head width)."""
        # Repeated by hand: not every attention kernel takes fewer key heads than query heads.
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels by their position; x: (rows, heads, sequence, head width)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class LlamaModel(nn.Module):
    """Tokens (rows, sequence), int64, to logits (rows, sequence, vocabulary)."""

    def __init__(self, size: Llama) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        turns = torch.arange(size.sequence)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
