"""The state of one rank's optimizer, on all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

from shardwise.horovod.adasum_optimizer import AdasumSteps
from shardwise.horovod.asking import wait
from shardwise.horovod.broadcast import broadcast_async_
from shardwise.horovod.context import current
from shardwise.horovod.objects import broadcast_object
from shardwise.horovod.optimizer import ReducedSteps
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.sparse_allreduce import known_sparse, no_rows

NAME = "broadcast_optimizer_state"


def broadcast_optimizer_state(
    optimizer: optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give `optimizer` the state and the options (learning rates ...) of `root_rank`'s.

    Where that one has no state yet, every rank makes a step with gradients of zero first, as in
    Horovod, whose numbers come of it: Adam has counted a step, weight decay has moved the weights,
    and `param.grad` is left as zeros. Others than the root need not have any state. `model` is
    there for Horovod's sake: embeddings with sparse gradients are found without it.
    """
    del model
    is_root = current().world.rank == root_rank
    if broadcast_object(_is_fresh(optimizer), root_rank, f"{NAME}.fresh", process_set):
        _step_with_zeros(optimizer)
    state: Any = optimizer.state_dict() if is_root else None
    forms = pytree.tree_map_only(Tensor, _form, state)
    forms = broadcast_object(forms, root_rank, NAME, process_set)
    if not is_root:
        state = pytree.tree_map_only(_Form, _Form.blank, forms)
    leaves = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.layout == torch.strided]
    handles = [
        broadcast_async_(tensor, root_rank, f"{NAME}.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        wait(handle)
    if not is_root:
        optimizer.load_state_dict(state)


def _is_fresh(optimizer: optim.Optimizer) -> bool:
    """Whether a step can make its first state; LBFGS, whose step needs a closure, keeps none."""
    return not optimizer.state and not isinstance(optimizer, optim.LBFGS)


def _step_with_zeros(optimizer: optim.Optimizer) -> None:
    """Make the state of an optimizer that has none, or forget the one that it has."""
    optimizer.state.clear()
    sparse = known_sparse(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                zeros = no_rows(param) if param in sparse else torch.zeros_like(param)
                param.grad = zeros.detach()
    eyes = current().eyes
    with nullcontext() if eyes is None else eyes.closed():
        if isinstance(optimizer, ReducedSteps | AdasumSteps):
            optimizer.step_alone()
        else:
            optimizer.step()


def _form(tensor: Tensor) -> _Form | Tensor:
    """What others make room for `tensor` by; itself where it is sparse, as the momentum of a sparse
    gradient is: its number of rows is its own."""
    return _Form(tensor) if tensor.layout == torch.strided else tensor.cpu()


class _Form:
    """A tensor's shape, dtype and kind of device."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._on_gpu = tensor.is_cuda

    def blank(self) -> Tensor:
        """A tensor like it, on this rank."""
        device = current().world.device if self._on_gpu else torch.device("cpu")
        return torch.empty(self._shape, dtype=self._dtype, device=device)
