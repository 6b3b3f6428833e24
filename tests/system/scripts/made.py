"""A training for `assert_same_training`, and one that is not the same on several workers."""

import torch
import torch.nn.functional as F
from torch import nn


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(3)]
    return model, optimizer, batches, lambda model, x, y: F.mse_loss(model(x), y)


def with_batch_norm():
    model, _, batches, loss_of = make()
    model.insert(1, nn.BatchNorm1d(8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, loss_of
