"""A model, settings for its activations, and comparisons, shared by the tests of activations."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import Settings
from shardwise.layout.placement import DEVICE, Tier
from shardwise.model.activations import Activations

CPU = torch.device("cpu")
WAYS = ["recomputed", "nvme", "recomputed+nvme"]


def settings(way: str, folder: Path, **more: Any) -> Settings:
    return Settings(
        activations="recomputed" if "recomputed" in way else "kept",
        offload_activations=Tier("nvme", str(folder)) if "nvme" in way else DEVICE,
        **more,
    )


@contextlib.contextmanager
def on(model: nn.Module, way: str, folder: Path) -> Iterator[None]:
    activations = Activations([model], settings(way, folder), CPU, rank=0)
    try:
        yield
    finally:
        activations.close()


class Block(nn.Module):
    """Takes and returns nested containers, draws random numbers, and has BatchNorm statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, state: dict[str, Any], *, scale: Tensor, flag: bool = True) -> dict[str, Any]:
        x, seen = state["x"], state["seen"]
        hidden = self.norm(self.first(x * scale).tanh())
        x = x + self.drop(self.second(F.gelu(hidden)))
        return {"x": x if flag else -x, "seen": [*seen, x.mean(1)]}


class Net(nn.Module):
    """Runs the same blocks `times` times."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        state: dict[str, Any] = {"x": x, "seen": []}
        for _ in range(times):
            for block in self.blocks:
                state = block(state, scale=self.scale, flag=len(state["seen"]) != 1)
        return self.head(state["x"]).square().mean() + sum(s.var() for s in state["seen"])


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def x(seed: int = 0, rows: int = 12) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def same(ours: nn.Module, plain: nn.Module) -> None:
    """Assert that gradients, buffers and the generator's state are equal, bit for bit."""
    for name, grad in gradients(plain).items():
        assert grad is not None, name
        assert torch.equal(gradients(ours)[name], grad), name
    for (name, one), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other), name
