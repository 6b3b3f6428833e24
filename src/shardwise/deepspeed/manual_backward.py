"""Makes `loss.backward()` and `engine.scale(loss).backward()` do what `engine.backward(loss)` does.

DeepSpeed takes all three. torch gives no hook that sees the loss of a backward before it runs, and
the engine must weigh the loss first: so the method of tensors is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardwise.bridging.trained_models import graph_nodes

Backward = Callable[[Tensor], Tensor]
BackwardOf = Callable[..., Any]
"""A backward that takes `retain_graph` too."""

Engine = tuple[frozenset[int], BackwardOf]
"""The identities of an engine's parameters, and its backward."""


def as_loss(loss: Tensor, backward: Backward) -> Tensor:
    """Return a scalar of the value of `loss` outside of its graph. Its backward calls `backward`
    with `loss` times the incoming gradient, which is 1 unless the script computes further."""
    begin = torch.zeros((), device=loss.device, requires_grad=True)
    # In a tuple, because autograd would also run the graph of a plain tensor argument.
    found: Tensor = _Loss.apply(begin, (loss, backward))  # type: ignore[no-untyped-call]
    return found


def lead_backwards(trained: Callable[[], Iterable[Engine]]) -> None:
    """Make `loss.backward()` call the engines that train a parameter in the graph of `loss`.

    `trained` returns the engines that train now. Other losses keep torch's backward.
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
        engines = [] if create_graph or inputs is not None else _reached(self, list(trained()))
        if not engines:
            stock(self, gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]
            return
        loss = self if gradient is None else (self * gradient).sum()
        for number, each in enumerate(engines, 1):
            each(loss, retain_graph=bool(retain_graph) or number < len(engines))

    Tensor.backward = backward  # type: ignore[method-assign]


def _reached(loss: Tensor, trained: Sequence[Engine]) -> list[BackwardOf]:
    """Return the backwards of the engines with a parameter in the graph of `loss`."""
    left, found = list(trained), []
    for node in graph_nodes(loss):
        if not left:  # usually after a few nodes, of the last layer
            break
        if hasattr(node, "variable"):
            reached = [each for each in left if id(node.variable) in each[0]]
            found += [backward for _, backward in reached]
            left = [each for each in left if each not in reached]
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Tensor, given: tuple[Tensor, Backward]) -> Tensor:
        del begin  # autograd calls backward only if an input requires a gradient
        ctx.loss, ctx.backward_of_engine = given
        return given[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.backward_of_engine(ctx.loss * gradients[0])
        return None, None
