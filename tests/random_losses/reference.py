"""The undisturbed run: what `tests/system/scripts/survives.py` computes in one plain process."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.data.order import epoch_order
from tests.random_losses.model import make_data, make_model

ADAMW = ("adamw", "split", "stages", "context", "experts")
"""The kinds that AdamW trains."""

STEPS = 14
"""Two epochs of 50 samples, in batches of 8."""


@cache
def undisturbed(kind: str, order: tuple[int, ...]) -> tuple[list[float], torch.Tensor]:
    """Train in one plain PyTorch process on the samples in `order`."""
    rows, labels = make_data(kind)
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model(kind)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind in ADAMW
        else torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    )
    if kind == "writes":
        model[0].bias.requires_grad_(False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    losses = []
    for epoch in (order[:50], order[50:]):
        for first in range(0, 50, 8):
            batch = list(epoch[first : first + 8])
            scores = model(rows[batch]).reshape(-1, 3)
            loss = nn.functional.cross_entropy(scores, labels[batch].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if kind == "experts":
                model[1].update_bias()
            losses.append(loss.item())
            if kind == "writes" and len(losses) == 5:
                with torch.no_grad():
                    for number in (0, 3):
                        model.get_submodule(str(number)).bias.add_(0.25)
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()])


@cache
def order() -> tuple[int, ...]:
    """Return the Loader's order of the samples in both epochs."""
    epochs = (epoch_order(3, epoch, 50, shuffle=True) for epoch in range(2))
    return tuple(int(index) for epoch in epochs for index in epoch)


def check(
    folder: Path,
    kind: str,
    left: list[int],
    first: int = 0,
    joined: Collection[int] = (),
) -> None:
    """Compare the results in `folder` of the ranks that are left with the undisturbed run.

    `first` is the number of steps before those that they have stored. The ranks in `joined` have
    only stored the steps after they joined.
    """
    losses, weights = undisturbed(kind, order())
    stored: list[dict[str, Any]] = [torch.load(folder / f"out-{rank}.pt") for rank in left]
    for place, found in enumerate(stored):
        since = STEPS - len(found["losses"]) if left[place] in joined else first
        assert found["losses"] == pytest.approx(losses[since:], rel=1e-8)
        assert torch.allclose(found["weights"], weights, rtol=1e-8, atol=1e-10)
        # The second copies have the bits of their originals.
        for bucket, (owner, copies) in found.get("copies", {}).items():
            originals = stored[left.index(owner)]["own"][bucket]
            assert len(copies) == len(originals)
            assert all(map(torch.equal, copies, originals))
