"""Model, optimizer and batches of the checkpoints in this folder, which DeepSpeed 0.19.8 wrote.

`python -m tests.deepspeed_checkpoints` made each folder. It trains STEPS steps on the batches of
`batch`, saves, and trains MORE steps, whose losses are in `losses.json`. The tests load a folder
and train the same steps.
"""

from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
ROWS = 12
STEPS, MORE = 3, 4


class Small(nn.Module):
    """Two layers with sizes that no world size divides; tied and frozen weights, buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.second = nn.Linear(11, 3)
        self.still = nn.Linear(3, 3, bias=False)
        self.still.weight.requires_grad_(False)
        self.out = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("shift", torch.full((3,), 0.25))
        self.register_buffer("version", torch.tensor([3]))

    def forward(self, x):
        x = self.second(torch.tanh(self.norm(self.first(x))))
        x = x + self.shift.to(x.dtype)
        return self.again(torch.tanh(self.out(self.still(x))))


def made(dtype=torch.float32):
    """Return the model before the first step."""
    torch.manual_seed(11)
    return Small().to(dtype)


def optimizer_of(model):
    """Return AdamW with two groups, the second without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def scheduler_of(optimizer):
    """Return a scheduler with another rate at each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def batch(step, rank=0, size=1):
    """Return inputs and targets of `rank` of `size` in step `step`."""
    draws = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(ROWS, 7, generator=draws), torch.randn(ROWS, 3, generator=draws)
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return x[mine], y[mine]
