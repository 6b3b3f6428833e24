"""A backward in two halves, as zero-bubble schedules run it (Qi et al., 2023).

The first makes the gradients of what a stage was given, which the stage before waits for; the
second those of parameters. Where a graph is cut between the two is worked out by torch's
pipelining: the gradients that both halves need are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_halves


class Halves:
    """The backward of `roots` from `grads` to `leaves` and to the parameters that are trained."""

    def __init__(
        self,
        roots: list[Tensor],
        grads: list[Tensor],
        leaves: Sequence[Tensor],
        trained: Callable[[], list[nn.Parameter]],
    ) -> None:
        self._roots, self._grads = roots, grads
        self._leaves = leaves
        self._trained = trained
        self._groups: list[dict[str, Any]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the first half has been run."""
        return self._groups is not None

    def add(self, more: Sequence[tuple[Tensor, Tensor]], factor: float | Tensor) -> None:
        """Let gradients that come in another way be added: each with its parameter.

        They are multiplied by `factor` later, and have been already.
        """
        for parameter, grad in more:
            self._roots.append(parameter)
            self._grads.append(grad / factor)

    def begin(self) -> None:
        """The first half: gradients of the leaves, in their `grad`."""
        find = torch_halves._get_grad_fn_or_grad_acc
        nodes = [node for root in self._roots if (node := find(root)) is not None]
        reverse = torch_halves.construct_reverse_graph(nodes)
        inputs = [node for leaf in self._leaves if (node := find(leaf)) is not None]
        weights = [node for p in self._trained() if (node := find(p)) is not None]
        self._groups = torch_halves.get_param_groups(inputs, weights, reverse)
        handles = []
        for group in self._groups:
            group["intermediates"] = list(group["intermediates"])
            group["grads"] = [None] * len(group["intermediates"])
            for place, node in enumerate(group["intermediates"]):
                handles.append(node.register_prehook(_keep(group, place)))
        try:
            found = torch.autograd.grad(
                self._roots, self._leaves, self._grads, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for leaf, grad in zip(self._leaves, found, strict=True):
            leaf.grad = grad
        self._roots, self._grads = [], []

    def finish(self, *, keep_graph: bool = False) -> None:
        """The rest: gradients of parameters, in their `grad`; of the leaves too, if that has not
        been."""
        if self._groups is None:
            pairs = [
                pair for pair in zip(self._roots, self._grads, strict=True) if pair[0].requires_grad
            ]
            if pairs:
                roots, grads = zip(*pairs, strict=True)
                torch.autograd.backward(roots, grads, retain_graph=keep_graph)
            return
        kept = [group for group in self._groups if any(g is not None for g in group["grads"])]
        kept = [_reached(group) for group in kept]
        torch_halves.stage_backward_weight(iter(self._trained()), kept)
        for parameter, grad in zip(self._roots, self._grads, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._groups = None


def _keep(group: dict[str, Any], place: int) -> Callable[[Any], None]:
    def hook(grads: Any) -> None:
        group["grads"][place] = grads

    return hook


def _reached(group: dict[str, Any]) -> dict[str, Any]:
    """A group without the places that the first half has not come by."""
    pairs = zip(group["grads"], group["intermediates"], strict=True)
    reached = [(grads, node) for grads, node in pairs if grads is not None]
    return group | {
        "grads": [grads for grads, _ in reached],
        "intermediates": [node for _, node in reached],
    }
