"""Makes `loss.backward()` and `engine.scale(loss).backward()` behave like `engine.backward(loss)`.

DeepSpeed supports all three. The engine must weight the loss before its backward pass, but torch
has no hook at that point. This module therefore replaces `Tensor.backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.loss_terms import graph_nodes

Backward = Callable[[Tensor], Tensor]
BackwardOf = Callable[..., Any]
"""A backward function with the keyword argument `retain_graph`."""

Engine = tuple[frozenset[int], BackwardOf]
"""The ids of an engine's parameters, and its backward function."""


def as_loss(loss: Tensor, backward: Backward) -> Tensor:
    """Return a scalar equal to `loss`, in a new graph whose backward pass calls `backward`.

    `backward` receives `loss` times the incoming gradient, which is 1 unless the script uses the
    scalar in further computations.
    """
    begin = torch.zeros((), device=loss.device, requires_grad=True)
    # Pass the loss in a tuple to hide it from autograd, which would also run its graph.
    found: Tensor = _Loss.apply(begin, (loss, backward))  # type: ignore[no-untyped-call]
    return found


def lead_backwards(trained: Callable[[], Iterable[Engine]]) -> None:
    """Make `loss.backward()` use the engines that train a parameter in the loss's graph.

    `trained` returns the current engines. If none of them trains such a parameter, torch's own
    backward runs.
    """
    stock = Tensor.backward

    @wraps(stock)
    def backward(
        self: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        # Leave second derivatives and `inputs` to torch's own backward.
        engines = [] if create_graph or inputs is not None else _reached(self, list(trained()))
        if not engines:
            stock(self, gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]
            return
        # As in torch, `gradient` weights the elements of a loss that is not a scalar.
        loss = self if gradient is None else (self * gradient).sum()
        # Each engine runs a backward pass over the same graph, so only the last may free it.
        for number, each in enumerate(engines, 1):
            each(loss, retain_graph=bool(retain_graph) or number < len(engines))

    Tensor.backward = backward  # type: ignore[method-assign]


def _reached(loss: Tensor, trained: Sequence[Engine]) -> list[BackwardOf]:
    """Return the backward functions of the engines that have a parameter in the loss's graph."""
    left, found = list(trained), []
    for node in graph_nodes(loss):
        if not left:  # usually after a few nodes, in the last layer
            break
        if hasattr(node, "variable"):
            reached = [each for each in left if id(node.variable) in each[0]]
            found += [backward for _, backward in reached]
            left = [each for each in left if each not in reached]
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Tensor, given: tuple[Tensor, Backward]) -> Tensor:
        del begin  # only needed because autograd calls backward if an input requires a gradient
        ctx.loss, ctx.backward_of_engine = given
        return given[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Autograd disables gradients here, but the product needs a graph for the engine's backward
        # pass.
        with torch.enable_grad():
            ctx.backward_of_engine(ctx.loss * gradients[0])
        return None, None
