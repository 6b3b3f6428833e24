"""Train a language model on long sequences, with a part of every sequence on each worker.

    shardwise run -n 2 --context 2 examples/recipes/long_sequences.py

Prints the loss per token of each epoch, and the accuracy on held-out sequences.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw

LENGTH, WORDS, WIDTH, HEADS = 256, 16, 32, 4

world = sw.init(seed=0)
with world.alike():  # the same data on every worker
    phrases = torch.randint(WORDS, (96, 8))
texts = phrases.repeat(1, LENGTH // 8 + 1)[:, : LENGTH + 1]  # each text repeats its phrase


def sample(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, labels that are shifted before the split, and positions."""
    return text[:-1], text[1:], torch.arange(LENGTH)


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape  # the length of this worker's part
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # With --context, this call computes attention over the whole sequences.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next word at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places(positions)))


model = Model()
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
samples = [sample(text) for text in texts]
loader = sw.Loader(samples[:64], batch_size=16, shuffle=True)
held_out = sw.Loader(samples[64:], batch_size=16)

for epoch in loader.epochs(4):
    loss_sum, tokens = 0.0, 0.0
    for inputs, labels, positions in loader:
        engine.backward(F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten()))
        stats = engine.step(max_norm=1.0)
        loss_sum, tokens = loss_sum + stats.loss * stats.weight, tokens + stats.weight
    world.print(f"epoch {epoch}: {loss_sum / tokens:.4f} per token, {tokens:.0f} tokens")

metrics = sw.Metrics()
with torch.no_grad():
    for inputs, labels, positions in held_out:
        right = (model(inputs, positions).argmax(2) == labels).double().mean()
        metrics.add(n=labels.numel(), accuracy=right)  # n: this worker's tokens
world.print(f"accuracy {metrics.compute()['accuracy']:.4f}")
