"""Fine-tune on prompts and answers of different lengths, with steps of a fixed number of tokens.

    shardwise run -n 2 examples/recipes/token_budget.py

Prints the loss per answer token, and the number of answer tokens, in each epoch.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import shardwise as sw

PADDING = -100  # cross_entropy ignores these targets
Sample = tuple[torch.Tensor, int]

world = sw.init(seed=0)
with world.alike():  # the same data on every worker
    lengths = torch.randn(64).mul(0.7).add(2.8).exp().long().clamp(6, 96).tolist()
    samples: list[Sample] = [(torch.randint(1, 30, (n,)).sort().values, n // 3) for n in lengths]


def collate(rows: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad to inputs and targets of shape (rows, longest - 1). Targets of the prompt are ignored."""
    targets = [tokens[1:].clone() for tokens, _ in rows]
    for target, (_, prompt) in zip(targets, rows, strict=True):
        target[: prompt - 1] = PADDING
    inputs = pad_sequence([tokens[:-1] for tokens, _ in rows], batch_first=True)
    return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDING)


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
loader = sw.Loader(
    samples,
    tokens=384,  # of a step, on all workers together
    micro_batch_tokens=128,  # of a forward pass on one worker, after padding
    length=lambda sample: len(sample[0]),
    shuffle=True,
    collate_fn=collate,
)

for epoch in loader.epochs(4):
    loss_sum, answers = 0.0, 0.0
    for step in loader.steps():
        for inputs, targets in step:
            scores = model(inputs)
            # The engine weights this mean by its number of answer tokens.
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING
            )
            engine.backward(loss)
        stats = engine.step(max_norm=1.0)
        loss_sum, answers = loss_sum + stats.loss * stats.weight, answers + stats.weight
    world.print(f"epoch {epoch}: {loss_sum / answers:.4f} per answer token, {answers:.0f} tokens")
