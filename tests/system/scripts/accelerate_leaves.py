"""A loop with stock Accelerate that rank 1 leaves too early."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x,) in enumerate(loader):
    if number == 1 and accelerator.process_index == 1:
        break
    accelerator.backward(model(x).square().mean())
    optimizer.step()
accelerator.wait_for_everyone()
