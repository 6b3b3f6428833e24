"""Broadcasts objects, parameters and optimizer state (Horovod's module of this name)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

from shardwise.errors import BadCall, HorovodInternalError
from shardwise.horovod.context import current
from shardwise.horovod.gather_scatter import allgather_async, broadcast_, broadcast_async_
from shardwise.horovod.operations import wait
from shardwise.horovod.optimizer import AdasumOptimizer, ReducingOptimizer
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.sparse_allreduce import empty_sparse_gradient, sparse_parameters
from shardwise.net import authentication

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

try:
    pickler = import_module("cloudpickle")
except ModuleNotFoundError:
    pickler = pickle


_PURPOSE = "object"


def _pickled(obj: Any) -> Tensor:
    """`obj` as bytes. With cloudpickle, where it is installed, functions and classes of the script
    travel by value, as in Horovod; pickle sends the names of those that can be imported."""
    try:
        found = pickler.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "send plain values"
        if pickler is pickle:
            hint = "pip install cloudpickle for lambdas and local classes, or send plain values"
        raise BadCall(f"{type(obj).__name__} cannot travel ({error}): {hint}.") from error
    data = authentication.sealed(_secret(), _PURPOSE, found)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    """Unpickle bytes of `_pickled`. They must carry this run's seal: a pickle of anybody else's
    could run code."""
    try:
        return pickle.loads(authentication.unsealed(_secret(), _PURPOSE, data.numpy().tobytes()))
    except authentication.Forged as error:
        raise HorovodInternalError(
            f"What came as an object is not of this run ({error}) Somebody else has reached the "
            "ports of its ranks: see docs/security.md."
        ) from None


def _secret() -> bytes:
    return current().world.collectives.status_server.secret


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast rank `root_rank`'s `obj` to every rank. Raises BadCall for what cannot be
    pickled."""
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    data = _pickled(obj) if is_root else None
    length = torch.tensor([0 if data is None else data.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return obj if is_root else _unpickled(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A function that broadcasts its argument by `broadcast_object`."""

    def fn(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return fn


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather every rank's `obj`, in rank order, on every rank. Raises BadCall for what cannot be
    pickled."""
    name = name or "allgather_object"
    data = _pickled(obj)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    whole = allgather_async(data, f"{name}.bytes", process_set)
    sizes: list[int] = wait(lengths).tolist()
    return [_unpickled(part) for part in wait(whole).split(sizes)]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the tensors of `params`, a state_dict or parameters with names or without, the values of
    `root_rank`'s, in place. What is no tensor is left alone."""
    given: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    pairs = [(None, each) if isinstance(each, Tensor) else each for each in given]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise BadCall(
            "hvd.broadcast_parameters takes model.state_dict(), model.named_parameters() or "
            "model.parameters()."
        )
    handles = [
        broadcast_async_(
            tensor.data,
            root_rank,
            None if name is None else f"broadcast_parameters.{name}",
            process_set,
        )
        for name, tensor in pairs
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        wait(handle)


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
    if broadcast_object(_needs_first_step(optimizer), root_rank, f"{NAME}.fresh", process_set):
        _step_on_zero_gradients(optimizer)
    state: Any = optimizer.state_dict() if is_root else None
    specs = pytree.tree_map_only(Tensor, _tensor_spec, state)
    specs = broadcast_object(specs, root_rank, NAME, process_set)
    if not is_root:
        state = pytree.tree_map_only(_TensorSpec, _TensorSpec.empty, specs)
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


def _needs_first_step(optimizer: optim.Optimizer) -> bool:
    """Whether a step can make its first state; LBFGS, whose step needs a closure, keeps none."""
    return not optimizer.state and not isinstance(optimizer, optim.LBFGS)


def _step_on_zero_gradients(optimizer: optim.Optimizer) -> None:
    """Create the optimizer's state by one step on zero gradients; discards the state it has."""
    optimizer.state.clear()
    sparse = sparse_parameters(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                zeros = empty_sparse_gradient(param) if param in sparse else torch.zeros_like(param)
                param.grad = zeros.detach()
    watcher = current().watcher
    with nullcontext() if watcher is None else watcher.paused():
        if isinstance(optimizer, ReducingOptimizer | AdasumOptimizer):
            optimizer.step_alone()
        else:
            optimizer.step()


def _tensor_spec(tensor: Tensor) -> _TensorSpec | Tensor:
    """The spec from which other ranks allocate `tensor`; the tensor itself where it is sparse, as
    the momentum of a sparse gradient is, since its number of rows differs."""
    return _TensorSpec(tensor) if tensor.layout == torch.strided else tensor.cpu()


class _TensorSpec:
    """A tensor's shape, dtype and kind of device."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._on_gpu = tensor.device.type != "cpu"

    def empty(self) -> Tensor:
        """A tensor like it, on this rank."""
        device = current().world.device if self._on_gpu else torch.device("cpu")
        return torch.empty(self._shape, dtype=self._dtype, device=device)
