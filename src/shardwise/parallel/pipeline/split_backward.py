"""Splits a backward pass into two halves, for zero-bubble schedules (Qi et al., 2023).

The first half computes the gradients of a stage's inputs, because the previous stage waits for
them. The second half computes the parameters' gradients. torch.distributed.pipelining finds the
boundary between the halves in the graph. The gradients at the boundary are stored, because both
halves need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from shardwise.errors import UsageError


class SplitBackward:
    """A backward pass from `roots` to `leaves` and to the trained parameters, in two halves.

    If a root depends on no leaf, the second half starts from the roots again. The part of the graph
    that both halves share is then computed twice.

    Args:
        roots: The tensors that the backward pass starts from.
        grads: The gradients of `roots`.
        leaves: The stage's inputs.
        trained: Returns the parameters that receive gradients.
        inputs: The only tensors that receive gradients, or None for all.
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
        """True once the leaves have their gradients."""

    @property
    def writes_grads_itself(self) -> bool:
        """True if the second half writes to `grad` directly, without running gradient hooks."""
        return self._groups is not None

    @cached_property
    def _graph(self) -> tuple[list[Any], dict[Any, Any]]:
        """The roots' autograd nodes, and the reversed graph from the leaves to the roots."""
        torch_backward = _torch_backward()
        find = torch_backward._get_grad_fn_or_grad_acc
        nodes = [node for root in self._roots if (node := find(root)) is not None]
        return nodes, torch_backward.construct_reverse_graph(nodes)

    @property
    def is_in_one_piece(self) -> bool:
        """True if the graph cannot be split, because it contains a reentrant checkpoint.

        Raises UsageError if the backward pass would then also reach parameters that are not in
        `inputs`.
        """
        _, reverse = self._graph
        if not any(isinstance(node, CheckpointFunction._backward_cls) for node in reverse):
            return False
        if self._inputs is not None:
            raise UsageError(
                "torch.utils.checkpoint(..., use_reentrant=True) in a layer computes gradients for "
                "all engines of its graph, and there are several. Write use_reentrant=False."
            )
        return True

    @property
    def is_done(self) -> bool:
        return self.inputs_done and not self._roots and self._groups is None

    def input_backward(self) -> None:
        """Run the first half: store the leaves' gradients in their `grad` attributes."""
        self.inputs_done = True
        groups = self._find_boundary()
        # The second half starts from the gradients at the boundary. The first half computes them
        # anyway, so capture them with hooks.
        handles = []
        for group in groups or []:
            group["intermediates"] = list(group["intermediates"])
            group["grads"] = [None] * len(group["intermediates"])
            for place, node in enumerate(group["intermediates"]):
                keep = partial(group["grads"].__setitem__, place)
                handles.append(node.register_prehook(keep))
        try:
            leaf_grads = torch.autograd.grad(
                self._roots, self._leaves, self._grads, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for leaf, grad in zip(self._leaves, leaf_grads, strict=True):
            leaf.grad = grad
        del self._graph  # it references every node, and so all saved tensors
        self._groups = groups
        if groups is not None:
            self._roots, self._grads = [], []

    def _find_boundary(self) -> list[dict[str, Any]] | None:
        """Group the parameters by the boundary nodes that their gradients depend on.

        Returns None if there is a root that depends on no leaf.
        """
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
        """Run the second half: store the parameters' gradients in their `grad` attributes.

        If the first half has not run, store the leaves' gradients too.
        """
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
    """Return torch's module for split backward passes, imported on first use (it takes seconds)."""
    from torch.distributed.pipelining import _backward

    return _backward


def _add_gradients(group: dict[str, Any], owners: dict[Any, nn.Parameter]) -> None:
    """Compute the gradients of a group's parameters from the boundary, and add them to `grad`.

    torch's own function for this is not used: in torch 2.9, it wrongly adds up the gradients of all
    outputs if a node has several.
    """
    pairs = zip(group["intermediates"], group["grads"], strict=True)
    node_grads = [(node, grads) for node, grads in pairs if grads is not None]
    edges = [
        (GradientEdge(node, place), grad)
        for node, grads in node_grads
        for place, grad in enumerate(grads)
        if grad is not None
    ]
    if not edges:
        return
    parameters = [owners[node] for node in group["params"]]
    # If one boundary node leads to another, autograd would add its contribution. The stored
    # gradient already includes it, so a hook replaces the sum.
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in node_grads]
    try:
        parameter_grads = torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(node, 0) for node in group["params"]],
            [grad for _, grad in edges],
            retain_graph=True,  # groups may have nodes in common
        )
    finally:
        for handle in handles:
            handle.remove()
    for parameter, grad in zip(parameters, parameter_grads, strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
