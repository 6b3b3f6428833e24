"""Problems of the parity tests: tiny models, their data and optimizers.

Imports torch and nothing of ours, because the plain reference process uses these models too.

No gradient is zero except for rounding (as for a bias before BatchNorm, or the bias of attention's
keys), and no activation has a kink: both amplify the last bit of a sum. For the same reason
Adagrad's sums start above zero: otherwise its first step is lr times the sign of each gradient,
however small.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

BATCH = 18
"""Number of rows in a global batch: three micro-batches for each of 1, 2, 3 and 4 workers."""

MICRO_ROWS = {1: 6, 2: 3, 3: 2, 4: 2}
"""Rows of a micro-batch by number of workers, so that a full window has three."""

ROWS = {"1": 36, "3": 36, "short": 39}
"""Number of rows in the dataset.

The last 3 of 39 form a window of one micro-batch, so one of four workers has no row.
"""

EPOCHS = {"1": 10, "3": 10, "short": 7}
"""For 20 steps, or 21."""

BRIEF = {"1": 3, "3": 3, "short": 2}
"""For 6 steps."""

CLASSES, TOKENS, LENGTH, WIDTH = 5, 24, 8, 16
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The description of a case for a plain process.

    `micro` is a key of ROWS. `clip` is the max_norm of clipping, or None. `groups` is the number
    of parameter groups, which differ in their weight decay. `workers` is the number of
    workers for which windows are cut, if the cut changes the result (BatchNorm); else 1. `brief` is
    a training of 6 steps instead of 20.
    """

    model: str
    optimizer: str
    micro: str
    dtype: torch.dtype
    clip: float | None
    schedule: str
    groups: int
    workers: int
    brief: bool = False

    @property
    def epochs(self) -> int:
        """Number of passes over all rows."""
        return (BRIEF if self.brief else EPOCHS)[self.micro]

    def model_and_optimizer(self, seed: int = 0) -> tuple[nn.Module, optim.Optimizer, Any]:
        """Return a new model, its optimizer and its scheduler."""
        torch.manual_seed(seed)
        model = MODELS[self.model]().to(self.dtype)
        optimizer = OPTIMIZERS[self.optimizer](parameter_groups(model, self.groups))
        return model, optimizer, SCHEDULES[self.schedule](optimizer)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return all rows: inputs and targets."""
        return DATA[self.model](ROWS[self.micro], self.dtype)

    def windows(self) -> Iterator[list[tuple[int, int]]]:
        """Return the total batches of the training in order, as rows [first, end) of the data."""
        for _ in range(self.epochs):
            for first in range(0, ROWS[self.micro], BATCH):
                yield first, min(first + BATCH, ROWS[self.micro])


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, CLASSES)
        )


class ConvNet(nn.Module):
    """Two convolutions, each with BatchNorm: running averages exponential and cumulative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.second_norm = nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, 2, 8, 8)."""
        x = F.silu(self.first_norm(self.first(x)))
        x = F.silu(self.second_norm(self.second(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T, WIDTH)."""
        heads = self.mix(self.before(x)).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = heads.movedim(-3, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class GPT(nn.Module):
    """Two layers; the output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T) tokens; returns (N, TOKENS, T)."""
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class DeepGPT(GPT):
    """Six blocks, for up to eight stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))


class OddMLP(nn.Sequential):
    """An MLP whose widths are not multiples of two, three or four."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 19), nn.GELU(), nn.Linear(19, CLASSES)
        )


class Heads(nn.Module):
    """Attention with four heads, a number in an attribute; with one projection, or three."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.n_head = 4
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T, WIDTH)."""
        if hasattr(self, "qkv"):
            several = self.qkv(x).chunk(3, -1)
        else:
            several = (self.q(x), self.k(x), self.v(x))
        heads = [each.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for each in several]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class SplittableBlock(nn.Module):
    """A block whose forward names no widths; 23 hidden features, which no small number divides."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attend = Heads(fused=fused)
        self.between = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 23)
        self.narrow = nn.Linear(23, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T, WIDTH)."""
        x = x + self.attend(self.before(x))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class SplittableGPT(nn.Module):
    """A GPT of SplittableBlocks, with a vocabulary of 25."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS + 1, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(SplittableBlock(fused=fused) for fused in (True, False))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS + 1, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T) tokens; returns (N, TOKENS + 1, T)."""
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the targets of `y` that count."""
    return F.cross_entropy(model(x), y, ignore_index=IGNORED)


def weight_of(y: Tensor) -> int:
    """Return the number of targets that count: rows, or tokens."""
    return int((y != IGNORED).sum())


def parameter_groups(model: nn.Module, count: int) -> list[dict[str, Any]]:
    """Return all parameters as one group, or matrices with decay and the rest without."""
    parameters = list(model.parameters())
    if count == 1:
        return [{"params": parameters, "weight_decay": 0.02}]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _vectors(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 10, generator=draw)
    return x.to(dtype), torch.randint(CLASSES, (rows,), generator=draw)


def _images(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 2, 8, 8, generator=draw) + torch.randn(rows, 1, 1, 1, generator=draw)
    return x.to(dtype), torch.randint(CLASSES, (rows,), generator=draw)


def _texts(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tokens. 1 to LENGTH of them count in each row, so rows and tokens differ."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(TOKENS, (rows, LENGTH), generator=draw)
    y = (x * 5 + 1) % TOKENS
    counted = torch.randint(1, LENGTH + 1, (rows, 1), generator=draw)
    return x, y.masked_fill(torch.arange(LENGTH) >= counted, IGNORED)


MODELS = {"mlp": MLP, "convnet": ConvNet, "gpt": GPT}
MODELS |= {"deep_gpt": DeepGPT, "odd_mlp": OddMLP, "splittable_gpt": SplittableGPT}
DATA = {"mlp": _vectors, "convnet": _images, "gpt": _texts}
DATA |= {"deep_gpt": _texts, "odd_mlp": _vectors, "splittable_gpt": _texts}
OPTIMIZERS = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: optim.AdamW(groups, lr=3e-3),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.01, initial_accumulator_value=1e-3),
}
SCHEDULES = {
    "constant": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    "cosine": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
}
