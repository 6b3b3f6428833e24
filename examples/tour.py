"""Train a small network on handwritten digits: the script of the quick tour (docs/tour.md).

    python examples/tour.py
    shardwise run -n 2 --zero 3 examples/tour.py

Prints the mean loss of each epoch and, at the end, the accuracy on images it has not seen.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--folder", help="checkpoints: save after each epoch, resume if there is one")
arguments = parser.parse_args()

world = sw.init(seed=0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = (
    TensorDataset(images[:1500], labels[:1500]),
    TensorDataset(images[1500:], labels[1500:]),
)

model = nn.Sequential(
    nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = sw.Engine(model, optimizer)
loader = sw.Loader(train, batch_size=60, shuffle=True)
engine.track(loader=loader)
if arguments.folder:
    engine.resume(arguments.folder)

for epoch in loader.epochs(arguments.epochs):
    losses = sw.Metrics()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step(max_norm=1.0)
        losses.add(loss=loss.detach())
    world.print(f"epoch {epoch}: loss {losses.compute()['loss']:.4f}")
    if arguments.folder:
        engine.save(arguments.folder)

metrics = sw.Metrics()
with torch.no_grad():
    for x, y in sw.Loader(test, batch_size=60):
        metrics.add(accuracy=(model(x).argmax(1) == y).float().mean())
world.print(f"accuracy {metrics.compute()['accuracy']:.4f}")
