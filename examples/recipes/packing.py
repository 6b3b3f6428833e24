"""Train a language model on texts of different lengths, packed end to end into rows of 96 tokens.

    shardwise run -n 2 examples/recipes/packing.py

Prints the loss per token in each epoch, and the share of padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shardwise as sw

ROW = 96

world = sw.init(seed=0)
with world.alike():  # the same data on every worker
    lengths = torch.randn(64).mul(0.7).add(2.8).exp().long().clamp(6, ROW).tolist()
    samples: list[dict[str, Any]] = [
        {"input_ids": torch.randint(1, 30, (n,)).sort().values} for n in lengths
    ]


class Model(nn.Module):
    """Predicts the next number, from the numbers of the same text and from its position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(30, 32), nn.Embedding(ROW, 32)
        self.mix, self.head = nn.Linear(32, 96), nn.Linear(32, 30)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if position_ids is None:  # a single text
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embed(input_ids) + self.places(position_ids)
        q, k, v = self.mix(hidden)[:, None].chunk(3, dim=-1)  # one head
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None
        )
        return self.head(hidden + mixed[:, 0])


model = Model()
packing = sw.Packing(model, row=ROW)
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = sw.Loader(
    samples,
    tokens=4 * ROW,  # four rows per step, on all workers together
    length=lambda sample: len(sample["input_ids"]),
    pack=packing,
    micro_batch_tokens=ROW,  # one row per forward pass on one worker
    shuffle=True,
)

for epoch in loader.epochs(4):
    loss_sum, labels = 0.0, 0.0
    for step in loader.steps():
        for batch in step:
            targets = batch.pop("labels")[:, 1:]
            scores = model(**batch)[:, :-1]
            # The engine weights this mean by its number of valid labels.
            engine.backward(cross_entropy(scores.flatten(0, 1), targets.flatten()))
        stats = engine.step(max_norm=1.0)
        loss_sum, labels = loss_sum + stats.loss * stats.weight, labels + stats.weight
    world.print(f"epoch {epoch}: {loss_sum / labels:.4f} per token")
