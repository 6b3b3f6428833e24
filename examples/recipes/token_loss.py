"""Train on padded sequences with a loss that is a mean over tokens, not over rows.

    shardwise run -n 2 examples/recipes/token_loss.py

Prints the loss per token and the number of tokens in each epoch.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import shardwise as sw

PADDING = -100  # cross_entropy ignores these targets

world = sw.init(seed=0)
with world.alike():  # the same data on every worker
    texts = [torch.randint(1, 30, (length,)).sort().values for length in range(4, 68)]


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad samples to inputs and targets of shape (rows, longest)."""
    inputs = pad_sequence([s[:-1] for s in samples], batch_first=True)
    targets = pad_sequence([s[1:] for s in samples], batch_first=True, padding_value=PADDING)
    return inputs, targets


class Model(nn.Module):
    """Predicts the next number of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


model = Model()
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = sw.Loader(texts, batch_size=16, shuffle=True, collate_fn=collate)

for epoch in loader.epochs(4):
    loss_sum, tokens = 0.0, 0.0
    for inputs, targets in loader:
        scores = model(inputs)
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING
        )
        # The engine reads the number of tokens from the graph of cross_entropy. For a loss that
        # it cannot read, give it: engine.backward(loss, weight=(targets != PADDING).sum())
        engine.backward(loss)
        stats = engine.step(max_norm=1.0)
        loss_sum, tokens = loss_sum + stats.loss * stats.weight, tokens + stats.weight
    world.print(f"epoch {epoch}: {loss_sum / tokens:.4f} per token, {tokens:.0f} tokens")
