"""Splits a backward in two, as zero-bubble schedules run it (Qi et al., 2023).

The first half computes the gradients of a stage's inputs, for which the stage before waits; the
second those of parameters. torch's pipelining finds the boundary in the graph; gradients there are
kept, for both halves need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from shardwise.errors import UsageError


class SplitBackward:
    """The backward of `roots` from `grads` to `leaves` and to the trained parameters.

    Of `inputs` only, where these are given. Where a root depends on no leaf, the second half starts
    from the roots again, and their common part is computed twice.
    """

    def __init__(
        self,
        roots: Sequence[Tensor],
        grads: Sequence[Tensor],
        leaves: Sequence[Tensor],
        trained: Callable[[], list[nn.Parameter]],
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        pairs = [pair for pair in zip(roots, grads, strict=True) if pair[0].requires_grad]
        self._roots = [root for root, _ in pairs]
        self._grads = [grad for _, grad in pairs]
        self._leaves = leaves
        self._trained = trained
        self._inputs = inputs
        self._groups: list[dict[str, Any]] | None = None
        self.inputs_done = False
        """Whether the leaves have their gradients already."""

    @property
    def writes_grads_itself(self) -> bool:
        """Whether the second half writes gradients into `grad` itself, so that no hook is
        called."""
        return self._groups is not None

    @cached_property
    def _graph(self) -> tuple[list[Any], dict[Any, Any]]:
        """The nodes of the roots, and the graph below them from the leaves upwards."""
        torch_backward = _torch_backward()
        find = torch_backward._get_grad_fn_or_grad_acc
        nodes = [node for root in self._roots if (node := find(root)) is not None]
        return nodes, torch_backward.construct_reverse_graph(nodes)

    @property
    def is_in_one_piece(self) -> bool:
        """Whether the graph cannot be split: a reentrant checkpoint has only one backward.

        Raises UsageError for one that must not compute all gradients either.
        """
        _, reverse = self._graph
        if not any(isinstance(node, CheckpointFunction._backward_cls) for node in reverse):
            return False
        if self._inputs is not None:
            raise UsageError(
                "torch.utils.checkpoint(..., use_reentrant=True) in a layer computes the gradients "
                "of all engines of its graph, and here are several. Write use_reentrant=False."
            )
        return True

    @property
    def is_done(self) -> bool:
        """Whether both halves have been run."""
        return self.inputs_done and not self._roots and self._groups is None

    def input_backward(self) -> None:
        """Run the first half: the gradients of the leaves, into their `grad`."""
        self.inputs_done = True
        groups = self._find_boundary()
        # The second half starts from the gradients at the boundary: hooks keep them while the first
        # half computes them anyway.
        handles = []
        for group in groups or []:
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
        del self._graph  # it holds every node, and with them what they have saved
        self._groups = groups
        if groups is not None:
            self._roots, self._grads = [], []

    def _find_boundary(self) -> list[dict[str, Any]] | None:
        """Groups of parameters with the nodes at the boundary; None where a root is not reached
        from the leaves."""
        torch_backward = _torch_backward()
        find = torch_backward._get_grad_fn_or_grad_acc
        nodes, reverse = self._graph
        inputs = [node for leaf in self._leaves if (node := find(leaf)) is not None]
        reached, _ = torch_backward.reverse_closure(inputs, set(), reverse)
        if any(node not in reached for node in nodes):
            return None
        weights = [node for p in self._trained() if (node := find(p)) is not None]
        groups: list[dict[str, Any]] = torch_backward.get_param_groups(inputs, weights, reverse)
        return groups

    def weight_backward(self, *, keep_graph: bool = False) -> None:
        """Run the rest: the gradients of parameters, into their `grad`; of the leaves too, unless
        that is done."""
        if self._groups is not None:
            find = _torch_backward()._get_grad_fn_or_grad_acc
            owners = {node: p for p in self._trained() if (node := find(p)) is not None}
            for group in self._groups:
                _add_gradients(group, owners)
        elif self._roots:
            inputs = self._trained() if self.inputs_done else self._inputs
            torch.autograd.backward(
                self._roots, self._grads, retain_graph=keep_graph, inputs=inputs
            )
        self._roots, self._grads, self._groups = [], [], None
        vars(self).pop("_graph", None)


def _torch_backward() -> Any:
    """torch's module for split backwards. Imported on first use: it takes seconds at every rank's
    start."""
    from torch.distributed.pipelining import _backward

    return _backward


def _keep(group: dict[str, Any], place: int) -> Callable[[Any], None]:
    def hook(grads: Any) -> None:
        group["grads"][place] = grads

    return hook


def _add_gradients(group: dict[str, Any], owners: dict[Any, nn.Parameter]) -> None:
    """Add to `grad` what the parameters of a group get from the gradients at the boundary.

    torch has a function for it; that of torch 2.9 adds up the gradients of all outputs of a node.
    """
    pairs = zip(group["intermediates"], group["grads"], strict=True)
    kept = [(node, grads) for node, grads in pairs if grads is not None]
    edges = [
        (GradientEdge(node, place), grad)
        for node, grads in kept
        for place, grad in enumerate(grads)
        if grad is not None
    ]
    if not edges:
        return
    parameters = [owners[node] for node in group["params"]]
    # A node that another one leads to gets its own gradient only: the kept one is all of it.
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in kept]
    try:
        found = torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(node, 0) for node in group["params"]],
            [grad for _, grad in edges],
            retain_graph=True,  # groups may have nodes in common
        )
    finally:
        for handle in handles:
            handle.remove()
    for parameter, grad in zip(parameters, found, strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
