"""Broadcasts objects, parameters and optimizer state. Horovod has a module of the same name."""

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


def _pickle_sealed(obj: Any) -> Tensor:
    """Pickle `obj`, and return the authenticated bytes as a tensor."""
    # As in Horovod, cloudpickle sends the script's functions and classes by value. Without it,
    # pickle sends only the names of importable ones.
    try:
        found = pickler.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "send plain values"
        if pickler is pickle:
            hint = "pip install cloudpickle for lambdas and local classes, or send plain values"
        raise BadCall(f"{type(obj).__name__} cannot be sent ({error}): {hint}.") from error
    data = authentication.sealed(_secret(), _PURPOSE, found)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickle_sealed(data: Tensor) -> Any:
    """Unpickle the bytes from `_pickle_sealed`. Raises HorovodInternalError if they are forged."""
    # Check the seal first, because a pickle from outside the run could execute code.
    try:
        return pickle.loads(authentication.unsealed(_secret(), _PURPOSE, data.numpy().tobytes()))
    except authentication.Forged as error:
        raise HorovodInternalError(
            f"A received object is not from this run ({error}) Another process has reached the "
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
    """Broadcast an object from one rank to every rank. Collective.

    Args:
        obj: The object to send. Ignored on ranks other than `root_rank`.
        root_rank: Global rank of the sender.
        name: Name of the operation, the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The object of `root_rank`.

    Raises:
        BadCall: If the object cannot be pickled.
        HorovodInternalError: If a received object is not from this run, or if a rank exits.

    Example:
        ```python
        epoch = hvd.broadcast_object(epoch, root_rank=0)
        ```
    """
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    data = _pickle_sealed(obj) if is_root else None
    length = torch.tensor([0 if data is None else data.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return obj if is_root else _unpickle_sealed(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a function that calls `broadcast_object` with its argument and these options."""

    def fn(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return fn


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather an object from every rank on every rank. Collective.

    Args:
        obj: The object of this rank.
        name: Name of the operation, the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The objects in rank order.

    Raises:
        BadCall: If the object cannot be pickled.
        HorovodInternalError: If a received object is not from this run, or if a rank exits.
    """
    name = name or "allgather_object"
    data = _pickle_sealed(obj)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    whole = allgather_async(data, f"{name}.bytes", process_set)
    sizes: list[int] = wait(lengths).tolist()
    return [_unpickle_sealed(part) for part in wait(whole).split(sizes)]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy tensors from rank `root_rank` to all ranks, in place. Collective.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(). Values of a
            state_dict that are not tensors are ignored.
        root_rank: Global rank of the sender.
        process_set: The ranks that take part.

    Raises:
        BadCall: If `params` has any other form.

    Example:
        ```python
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ```
    """
    given: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    pairs = [(None, each) if isinstance(each, Tensor) else each for each in given]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise BadCall(
            "hvd.broadcast_parameters needs model.state_dict(), model.named_parameters() or "
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
    """Copy an optimizer's state and options from rank `root_rank` to all ranks. Collective.

    If the root has no state yet, every rank first takes a step with zero gradients, to match
    Horovod's results: Adam's step count increases, weight decay changes the weights, and
    `param.grad` is zero afterwards. The other ranks do not need to have any state.

    Args:
        optimizer: Any torch optimizer, including a DistributedOptimizer.
        root_rank: Global rank of the sender.
        model: Ignored. Horovod uses it to find embeddings with sparse gradients.
        process_set: The ranks that take part.

    Example:
        ```python
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        ```
    """
    del model
    is_root = current().world.rank == root_rank
    # LBFGS cannot take that step, because it needs a closure.
    is_fresh = not optimizer.state and not isinstance(optimizer, optim.LBFGS)
    if broadcast_object(is_fresh, root_rank, f"{NAME}.fresh", process_set):
        _step_on_zero_gradients(optimizer)
    state: Any = optimizer.state_dict() if is_root else None
    # The other ranks allocate dense tensors from their specs. A sparse tensor, such as the momentum
    # of a sparse gradient, is pickled instead, because its number of rows differs between ranks.
    specs = pytree.tree_map_only(
        Tensor, lambda t: _TensorSpec(t) if t.layout == torch.strided else t.cpu(), state
    )
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


def _step_on_zero_gradients(optimizer: optim.Optimizer) -> None:
    """Replace the optimizer's state with its state after one step with zero gradients."""
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


class _TensorSpec:
    """The shape, dtype and device type of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._on_gpu = tensor.device.type != "cpu"

    def empty(self) -> Tensor:
        """Allocate an uninitialised tensor with this shape and dtype on this rank."""
        device = current().world.device if self._on_gpu else torch.device("cpu")
        return torch.empty(self._shape, dtype=self._dtype, device=device)
