"""One rank of benchmarks/exact.py: trains one model and prints, on rank 0, a line of JSON.

Started by `shardwise run`; whether the exact mode is on is a flag, of which nothing is seen here.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import models
import shardwise as sw
from workloads import Gpt

ROWS, BATCH = 500, 32
"""The last batch of an epoch is of 20 rows."""

TOKENS, LENGTH, CLASSES = 512, 32, 10
WARM_UP = 5


class DroppingGpt(nn.Module):
    """The GPT of the other benchmarks, with dropout before and behind its blocks."""

    def __init__(self) -> None:
        super().__init__()
        size = Gpt(
            name="exact", width=128, layers=3, vocabulary=TOKENS, sequence=LENGTH, batch=BATCH
        )
        self.gpt = models.GptModel(size)
        self.gpt.blocks.insert(0, nn.Dropout(0.1))
        self.gpt.blocks.append(nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt(x).transpose(1, 2)


class ConvNet(nn.Sequential):
    """Three convolutions with BatchNorm: (N, 3, 16, 16) to (N, CLASSES)."""

    def __init__(self) -> None:
        widths = (3, 16, 32, 64)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        ]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(64 * 4, CLASSES))


class Lstm(nn.Module):
    """Two layers with dropout between: tokens (N, T) to (N, TOKENS, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0]).transpose(1, 2)


MODELS = {"gpt": DroppingGpt, "convnet": ConvNet, "lstm": Lstm}


def data_of(model: str) -> TensorDataset:
    """Rows that can be learned, in part."""
    draw = torch.Generator().manual_seed(1)
    if model == "convnet":
        labels = torch.randint(CLASSES, (ROWS,), generator=draw)
        centres = torch.randn(CLASSES, 3, 16, 16, generator=draw)
        return TensorDataset(centres[labels] + torch.randn(ROWS, 3, 16, 16, generator=draw), labels)
    texts = torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=draw)
    texts[:, 1::2] = (texts[:, :-1:2] * 7 + 3) % TOKENS
    return TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())


def steps_of(loader: Any, count: int) -> Iterator[Any]:
    """`count` steps, epoch after epoch."""
    while True:
        for step in loader.steps():
            if not count:
                return
            count -= 1
            yield step


def main(name: str, steps: int) -> None:
    world = sw.init(seed=0, quiet=True, device="cpu")
    model = MODELS[name]()
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    loader = sw.Loader(data_of(name), BATCH, shuffle=True)
    told: list[float] = []
    times: list[float] = []
    for step in steps_of(loader, steps):
        begun = time.monotonic()
        for x, y in step:
            engine.backward(F.cross_entropy(model(x), y))
        stats = engine.step(max_norm=1.0)
        times.append((time.monotonic() - begun) * 1e3)
        told += [stats.loss, stats.grad_norm]
    with engine.full_parameters():
        values = [value.clone() for value in model.state_dict().values()]
    state = engine.optimizer_state_dict()["state"]
    values += [torch.as_tensor(v) for key in sorted(state) for v in state[key].values()]
    if world.is_main:
        ms = median(times[WARM_UP:])
        print(
            json.dumps(
                {
                    "hash": _hash([torch.tensor(told, dtype=torch.float64), *values]),
                    "loss": told[-2],
                    "ms": ms,
                }
            )
        )


def _hash(values: list[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=6)
    for value in values:
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
