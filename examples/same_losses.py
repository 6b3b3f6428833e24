"""The same losses under every placement: `shardwise run -n 4 --zero 2 examples/same_losses.py`.

    shardwise run -n 1 --zero 0 examples/same_losses.py
    shardwise run -n 4 --zero 2 examples/same_losses.py

It trains a small fp64 model for five steps, and prints the loss and gradient norm of each. The
model predicts the next character of argparse's source code from the eight before it.
"""

import argparse
import inspect

import torch
from torch import nn

import shardwise as sw

CONTEXT = 8


def dataset() -> torch.utils.data.TensorDataset:
    """Return pairs of eight characters and the next one, as codes below 128."""
    text = torch.tensor([min(ord(letter), 127) for letter in inspect.getsource(argparse)])
    windows = text.unfold(0, CONTEXT + 1, 1)[:4000]
    return torch.utils.data.TensorDataset(windows[:, :CONTEXT], windows[:, CONTEXT])


def main() -> None:
    """Train for five steps and print their losses and gradient norms."""
    world = sw.init(seed=0, quiet=True)
    model = nn.Sequential(
        nn.Embedding(128, 16),
        nn.Flatten(),
        nn.Linear(CONTEXT * 16, 64),
        nn.Tanh(),
        nn.Linear(64, 128),
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer)
    loader = sw.Loader(dataset(), batch_size=250, shuffle=True)
    world.print(f"{world.size} worker(s), {engine.placement.name}")
    for step in loader.steps():
        for x, y in step:
            engine.backward(nn.functional.cross_entropy(model(x), y))
        stats = engine.step(max_norm=1.0)
        world.print(f"step {step.number}  loss {stats.loss:.12f}  norm {stats.grad_norm:.12f}")
        if engine.steps == 5:
            break


if __name__ == "__main__":
    main()
