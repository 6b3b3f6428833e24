"""A DistributedDataParallel script whose loss curve looks right, and whose gradients are wrong.

    shardwise verify -n 2 --stock examples/mistakes/mean_of_means.py

Each rank averages the loss over its own tokens, and DistributedDataParallel averages over ranks.
The tokens of a rank with short texts count more than others. Seen in torchtitan#1842,
transformers#34191 and verl#3994.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
texts = [
    torch.randint(1, 20, (int(length),)).sort().values for length in torch.randint(4, 40, (64,))
]


class Model(nn.Module):
    """Predicts the next number of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 16), nn.GRU(16, 16), nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens.T))[0]).transpose(0, 1)


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Pad texts with 0 to shape (rows, longest)."""
    return pad_sequence(samples, batch_first=True)


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sampler = DistributedSampler(texts)
loader = DataLoader(texts, batch_size=4, sampler=sampler, collate_fn=collate)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens in loader:
        scores = model(tokens[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
