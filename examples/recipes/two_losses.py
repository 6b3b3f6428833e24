"""Train a model on two losses that are means over different numbers of items.

    shardwise run -n 2 examples/recipes/two_losses.py

The model is a classifier with an additional decoder. Its losses are the cross-entropy over the
labelled rows and the squared error over all pixels. Prints both means.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
labels[::3] = -1  # every third image has no label
encoder, classify, decode = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 64)
model = nn.ModuleDict({"encoder": encoder, "classify": classify, "decode": decode})
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
loader = sw.Loader(TensorDataset(images, labels), batch_size=100, shuffle=True)

for epoch in loader.epochs(4):
    metrics = sw.Metrics()
    for x, y in loader:
        hidden = encoder(x).relu()
        labelled = (y >= 0).sum()
        # Sums divided by counts over all workers give both means exactly, whatever each worker
        # has of them. reduction="sum" then adds the parts up.
        counts = world.sum(torch.stack([labelled, torch.tensor(len(x))]))
        wrong = nn.functional.cross_entropy(classify(hidden), y, ignore_index=-1, reduction="sum")
        blurred = (decode(hidden) - x).square().mean(1).sum()
        engine.backward(wrong / counts[0] + blurred / counts[1], reduction="sum")
        engine.step()
        metrics.add(n=int(labelled), classify=wrong.detach() / labelled.clamp(min=1))
        metrics.add(decode=blurred.detach() / len(x))
    means = metrics.compute()
    world.print(f"epoch {epoch}: classify {means['classify']:.4f}, decode {means['decode']:.4f}")
