"""Objects, parameters and optimizers of one rank on all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils import _pytree as pytree

from shardwise.errors import BadCall
from shardwise.horovod.allgather import allgather_async
from shardwise.horovod.asking import wait
from shardwise.horovod.broadcast import broadcast_, broadcast_async_
from shardwise.horovod.context import current
from shardwise.horovod.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s `obj` (picklable), on every rank."""
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if is_root else None
    length = torch.tensor([0 if data is None else data.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A function of an object that does `broadcast_object`."""

    def fn(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return fn


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's `obj` (picklable), in rank order, on every rank."""
    name = name or "allgather_object"
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    whole = allgather_async(data, f"{name}.bytes", process_set)
    sizes: list[int] = wait(lengths).tolist()
    return [pickle.load(io.BytesIO(part.numpy())) for part in wait(whole).split(sizes)]


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


def broadcast_optimizer_state(
    optimizer: optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give `optimizer` the state and the options (learning rates ...) of `root_rank`'s.

    Others need not have any state yet. `model` is there for Horovod's sake.
    """
    del model
    is_root = current().world.rank == root_rank
    state: Any = optimizer.state_dict() if is_root else None
    forms = pytree.tree_map_only(Tensor, _Form, state)
    forms = broadcast_object(forms, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        state = pytree.tree_map_only(_Form, _Form.blank, forms)
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    handles = [
        broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        wait(handle)
    if not is_root:
        optimizer.load_state_dict(state)


class _Form:
    """A tensor's shape, dtype and kind of device."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._on_gpu = tensor.is_cuda

    def blank(self) -> Tensor:
        """A tensor like it, on this rank."""
        device = current().world.device if self._on_gpu else torch.device("cpu")
        return torch.empty(self._shape, dtype=self._dtype, device=device)
