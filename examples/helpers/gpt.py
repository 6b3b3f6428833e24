"""A small GPT in plain PyTorch, without any code for several workers.

Its blocks are those of current open models: RMSNorm before each sub-layer (Zhang & Sennrich,
2019), rotary positions (Su et al., 2021), squared ReLU (So et al., 2021), and one matrix for input
and output tokens (Press & Wolf, 2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a GPT. `width` is a multiple of twice `heads`."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inward = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.outward = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, time, width = x.shape
        # (3, batch, heads, time, width / heads)
        parts = self.inward(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotate(parts[:2], cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, parts[2], is_causal=True)
        return self.outward(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.RMSNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.narrow = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        hidden = F.relu(self.widen(self.network_norm(x))).square()
        return x + self.narrow(hidden)


class GPT(nn.Module):
    """Maps token ids (batch, time) to scores of the next token (batch, time, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        cosine, sine = rotary_tables(shape.context, shape.width // shape.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the initial weights. Those of residual outputs are smaller, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("outward.weight", "narrow.weight"))
                shrink = math.sqrt(2 * self.shape.layers) if writes else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the scores. `positions` (batch, time) are 0, 1, 2 ... if they are left out."""
        if positions is None:
            time = tokens.shape[1]
            cosine, sine = self.cosine[:time], self.sine[:time]
        else:  # (batch, 1, time, width / heads / 2)
            cosine, sine = self.cosine[positions][:, None], self.sine[positions][:, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.linear(self.norm(x), self.embedding.weight)

    @property
    def number_of_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of (context, head_width / 2) angles."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of the last dim by the angles of their position."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def token_loss(
    model: GPT, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy per token, in nats."""
    return F.cross_entropy(model(tokens, positions).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def continue_text(
    model: GPT, prompt: list[int], count: int, *, seed: int, temperature: float = 0.7
) -> Iterator[int]:
    """Yield `count` tokens after `prompt`. The same weights and seed give the same tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.shape.context :]], device=device)
        scores = model(window)[0, -1].float().cpu() / temperature
        chances = scores.softmax(dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        yield tokens[-1]
