"""Definitions that the blocks of the guides use: a small model, its data and its loss.

As a program it is the train.py that they start: a loop with micro-batches that saves nothing.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

WIDTH, HEADS, WORDS = 16, 4, 32
loss_fn = F.cross_entropy
dataset = torch.utils.data.TensorDataset(
    torch.arange(48 * 6).reshape(48, 6) % WORDS, torch.arange(48) % WORDS
)


class Attention(nn.Module):
    """Attention whose parts have usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n_head = HEADS

    def forward(self, x: Tensor) -> Tensor:
        """Every token looks at all of them."""
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, self.n_head, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward pair."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP, each with a residual connection."""
        x = x + self.attn(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Guesses a word from six."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of shape (rows, words)."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.adapter(x).mean(1))


def main() -> None:
    """Train; the number of epochs is the one flag."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)  # more steps than a measurement drops
    epochs = parser.parse_args().epochs
    world = sw.init(seed=0)
    model = Model().to(world.device)
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = sw.Loader(dataset, batch_size=16, shuffle=True)
    for _ in loader.epochs(epochs):
        for step in loader.steps():
            for x, y in step:
                engine.backward(loss_fn(model(x), y))
            engine.step(max_norm=1.0)


if __name__ == "__main__":
    main()
