"""Train a small model in fp64 by the one call that works however layers are spread; print its loss
and a sum of its parameters."""

import torch
from torch import nn

import shardwise as sw

torch.set_num_threads(1)
world = sw.init(seed=0)
draw = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 50, (24, 6), generator=draw)
block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(50, 16), encoder, nn.Linear(16, 50)).double()
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).transpose(1, 2), batch)


for (batch,) in sw.Loader(torch.utils.data.TensorDataset(tokens), batch_size=8, shuffle=True):
    engine.forward_backward(loss_of, batch)
    stats = engine.step()
loss = float(stats.loss)
with engine.full_parameters():
    total = sum(float(p.detach().abs().sum()) for p in model.parameters())
world.print(f"loss {loss:.12f} sum {total:.9f} on {world.size}")
