"""Train an image classifier with BatchNorm, averaged weights and early stopping.

    shardwise run -n 2 --sync-batch-norm --ema-decay 0.9 examples/recipes/image_classifier.py

Prints the validation accuracy of each epoch, stops when it no longer improves, and writes the
best weights to best.safetensors.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels)
train = sw.Loader(TensorDataset(images[:1400], labels[:1400]), batch_size=100, shuffle=True)
valid = sw.Loader(TensorDataset(images[1400:], labels[1400:]), batch_size=100)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 64, 10),
)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def validate() -> float:
    """Return the accuracy on all validation images, the same number on every worker."""
    metrics = sw.Metrics()
    model.eval()
    with engine.ema(), torch.no_grad():  # the averaged weights
        for x, y in valid:
            metrics.add(accuracy=(model(x).argmax(1) == y).float().mean())
    model.train()
    return metrics.compute()["accuracy"]


best, since_best = 0.0, 0
for epoch in train.epochs(20):
    for x, y in train:
        engine.backward(nn.functional.cross_entropy(model(x), y))
        engine.step()
    accuracy = validate()
    world.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    since_best += 1
    if accuracy > best:
        best, since_best = accuracy, 0
        with engine.ema():
            engine.export("best.safetensors")
    if since_best == 3:  # equal on all workers, so they stop together
        break
world.print(f"best accuracy {best:.4f}, in best.safetensors")
