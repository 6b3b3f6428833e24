"""The models that `tests/system/scripts/survives.py` trains."""

import torch
from torch import nn


def make_model(kind: str) -> nn.Sequential:
    """Return the model that the script trains, with torch's default dtype."""
    torch.manual_seed(4)
    if kind in ("split", "stages"):
        hidden = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(16, 3))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model[1].eval()
    return model
