"""With context parallelism, the loss of an evaluation is multiplied by the number of ranks.

Each rank computes a part of every sequence. Training is right. The evaluation sums the means of
all parts. It decides when to stop early. Seen in transformers#48167 and axolotl#3371.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

right = "--right" in sys.argv
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
texts = torch.randint(0, 20, (96, 17)).sort(1).values  # 16 inputs and 16 targets each
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(texts[:64], batch_size=8, shuffle=True)  # the same rows on all ranks
held_out = DataLoader(texts[64:], batch_size=8)


def part_loss(tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of this rank's part of each sequence. The parts are equally long."""
    inputs, targets = (each.chunk(size, 1)[rank] for each in (tokens[:, :-1], tokens[:, 1:]))
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


for epoch in range(2):
    for tokens in loader:
        optimizer.zero_grad()
        part_loss(tokens).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    with torch.no_grad():
        loss = sum(part_loss(tokens) for tokens in held_out) / len(held_out)
    dist.all_reduce(loss)
    if right:
        loss /= size
    if rank == 0:
        print(f"epoch {epoch}: eval_loss {loss.item():.5f}")
dist.destroy_process_group()
