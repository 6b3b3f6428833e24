"""Trains with Lightning's Trainer or with Fabric.

torchrun --nproc-per-node 2 stock_lightning.py KIND
"""

import os
import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True))
options: dict[str, Any] = {
    "accelerator": "cpu",
    "strategy": "ddp" if kind == "fabric" else kind,
    "devices": int(os.environ.get("WORLD_SIZE", "1")),
}


def network() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


class Net(lightning.LightningModule):
    """The network, with its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        """Log the loss of a batch."""
        self.log("loss", self.training_step(batch, number), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


if kind == "fabric":
    fabric = lightning.Fabric(**options)
    fabric.launch()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    for a, b in loader:
        fabric.backward(nn.functional.mse_loss(model(a), b))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
else:
    options |= {"gradient_clip_val": 1.0} if kind == "ddp" else {}
    trainer = lightning.Trainer(
        **options,
        max_epochs=2,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, 8))
