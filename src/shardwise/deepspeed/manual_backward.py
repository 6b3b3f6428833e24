"""Makes `engine.scale(loss).backward()` do what `engine.backward(loss)` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[[Tensor], Tensor]


def as_loss(loss: Tensor, backward: Backward) -> Tensor:
    """A scalar of the value of `loss`, outside of its graph; its own backward calls `backward` with
    `loss`, times the gradient that arrives: 1, unless the script has gone on computing."""
    begin = torch.zeros((), device=loss.device, requires_grad=True)
    # In a tuple autograd does not see `loss`, whose graph it would else go through by itself too.
    found: Tensor = _Loss.apply(begin, (loss, backward))  # type: ignore[no-untyped-call]
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Tensor, given: tuple[Tensor, Backward]) -> Tensor:
        del begin  # without an input that has a gradient autograd would not come here
        ctx.loss, ctx.backward_of_engine = given
        return given[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.backward_of_engine(ctx.loss * gradients[0])
        return None, None
