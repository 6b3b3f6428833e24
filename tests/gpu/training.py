"""Models that the GPU tests train, with the engine and with plain PyTorch on the same device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import Solo
from tests.disk import on_a_disk

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False"
)

WIDTH, ROWS, CLASSES, STEPS = 32, 12, 5, 10


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, width)."""
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, width); returns (N, CLASSES)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Trained:
    """A training as it went, on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scale: float = 1.0
    values: list[Tensor] = field(default_factory=list)


def build(world, dtype=torch.float32, **shape):
    torch.manual_seed(0)
    model = Model(**shape).to(world.device, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(world, step, dtype=torch.float32, width=WIDTH, rows=ROWS):
    """Return inputs and targets of a full step."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(rows, width, generator=draw).to(world.device, dtype)
    return x, torch.randint(CLASSES, (rows,), generator=draw).to(world.device)


def loss_of(model, x, y, scale=1.0):
    return (
        nn.functional.cross_entropy(model(x).to(torch.promote_types(x.dtype, torch.float32)), y)
        * scale
    )


def train(world, *, dtype=torch.float32, micro=1, scales=None, **settings) -> Trained:
    """Train with the engine, in `micro` micro-batches. `scales` multiply the losses of steps."""
    model, optimizer = build(world, dtype)
    engine = sw.Engine(model, optimizer, bucket_mb=0.01, **settings)
    told = Trained()
    for step in range(STEPS):
        x, y = world.share(batch(world, step, dtype))
        for part, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            loss = loss_of(model, a, b, (scales or {}).get(step, 1.0))
            engine.backward(loss, weight=len(a), same_items=False, last=part == micro - 1)
        stats = engine.step(max_norm=1.0)
        told.losses.append(stats.loss)
        told.norms.append(stats.grad_norm)
        told.skipped.append(stats.skipped)
    with engine.full_parameters():
        told.values = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    told.scale = engine.loss_scale
    engine.close()
    for parameter in model.parameters():  # plain again, on the user's device
        states = optimizer.state[parameter]
        assert parameter.device == states["exp_avg"].device == world.device
    return told


def train_plain(world, *, dtype=torch.float32, autocast=None, scales=None) -> Trained:
    """Train with a plain loop on the same device, using a GradScaler for fp16 `autocast`."""
    model, optimizer = build(world, dtype)
    kind = world.device.type
    scaler = torch.amp.GradScaler(kind, enabled=autocast == torch.float16)
    told = Trained()
    for step in range(STEPS):
        x, y = batch(world, step, dtype)
        with torch.autocast(kind, autocast, enabled=autocast is not None):
            loss = loss_of(model, x, y, (scales or {}).get(step, 1.0))
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        told.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        told.losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        told.skipped.append(scaler.get_scale() < before)
        optimizer.zero_grad()
    told.values = [parameter.detach().cpu() for parameter in model.parameters()]
    told.scale = scaler.get_scale()
    return told


def assert_close(ours: Trained, plain: Trained, tolerance: float, *, values: bool = False) -> None:
    """Compare losses and norms, relative to the largest. With `values`, compare every tensor."""
    pairs = [
        (torch.tensor(getattr(t, name)) for t in (ours, plain)) for name in ("losses", "norms")
    ]
    if values:
        pairs += zip(ours.values, plain.values, strict=True)
    for one, other in pairs:
        finite = torch.isfinite(other)
        assert torch.equal(torch.isfinite(one), finite)
        distance = (one - other)[finite].abs().max() / other[finite].abs().max()
        assert distance <= tolerance, f"{distance:.1e} off; {tolerance} is allowed"


def tiers(**named: str) -> dict[str, str]:
    """Return settings that place states on the named tiers: device, cpu or nvme."""
    places = {"cpu": "cpu", "device": "device", "nvme": f"nvme:{on_a_disk()}"}
    return {f"offload_{name}": places[tier] for name, tier in named.items()}


@contextmanager
def alone(world):
    """Inside the block the rank is a plain python process, without a process group."""
    group, world.collectives = world.collectives, Solo()
    try:
        yield
    finally:
        world.collectives = group
