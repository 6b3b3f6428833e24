"""Compiled mixtures of experts on the GPU, compared with plain PyTorch."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.gpu.training import needs_gpu
from tests.unit.experts.naive import expert

pytestmark = needs_gpu

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = nn.ModuleList([expert(WIDTH, 32) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = sw.MoE(nn.Linear(WIDTH, 4, bias=False), experts, shared=expert(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, tokens, WIDTH)."""
        return x + self.moe(self.norm(x))


def losses(world: sw.World | None, device: str) -> list[float]:
    """Return the losses of five steps in plain PyTorch, or of an engine that compiles units."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = None if world is None else sw.Engine(model, optimizer, compile=True, quiet=True)
    found = []
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4 if step == 3 else 8, 5, WIDTH, generator=draw).to(device)
        if engine is None or world is None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        else:
            engine.backward(model(world.share(x)).square().mean())
            found.append(engine.step().loss)
    if engine is not None:
        engine.close()
    return found


def both_losses(world: sw.World, device: str) -> tuple[list[float], list[float]]:
    return losses(None, device), losses(world, device)


def test_two_ranks_equal_one_process(group):
    ranks = group(2, device="cuda", transport="gloo", expert=2)
    for expected, ours in ranks(both_losses, "cuda", limit=300):
        assert ours == pytest.approx(expected, rel=1e-4)
