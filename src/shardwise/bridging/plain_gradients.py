"""Averages the gradients of models that no prepared optimizer trains.

Such models have no engine. As with DistributedDataParallel, the script reads and uses `p.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError


def plain_backward(
    loss: Tensor,
    models: Sequence[nn.Module],
    world: sw.World,
    *,
    last: bool = True,
    retain_graph: bool = False,
) -> None:
    """Run torch's own backward pass for `loss`.

    If `last` is true, also average the gradients of `models` across ranks. The call is then
    collective.
    """
    # `p.grad` accumulates over steps until the script clears it. The gradients of earlier steps are
    # already identical on all ranks, so averaging them again does not change them.
    if world.context_size > 1:
        raise UsageError(
            f"--context {world.context_size} exchanges tokens only in models that an engine "
            "trains, but no optimizer was set up: pass an optimizer of the model's parameters too."
        )
    world.expect_no_engine()
    # Call the method of the class, because a bridge replaces the method of the loss itself.
    Tensor.backward(loss, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    if last and world.size > 1:
        _average(models, world)


def _average(models: Sequence[nn.Module], world: sw.World) -> None:
    found = (p for model in models for p in model.parameters() if p.requires_grad)
    parameters = list(dict.fromkeys(found))
    reached = torch.tensor([float(p.grad is not None) for p in parameters])
    # A loss may reach fewer parameters on some ranks. All ranks must average the same parameters.
    # The gradient of a parameter that no rank reaches remains None, so that its optimizer skips it.
    counts = world.sum(reached).tolist()
    parts: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, count in zip(parameters, counts, strict=True):
        if count:
            parts.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in parts.values():
        # Divide before the sum, because a sum of 16-bit gradients may overflow even if their mean
        # does not.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        dense = [g.to_dense() if g.is_sparse else g for g in gradients]
        own = torch.cat([gradient.reshape(-1) for gradient in dense]) / world.size
        mean = world.sum(own)
        values = torch.split(mean, [p.numel() for p in same])
        for parameter, value in zip(same, values, strict=True):
            parameter.grad = value.view(parameter.shape).clone()
