"""Objects and parameters of one rank on all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwise import authentication
from shardwise.errors import BadCall, HorovodInternalError
from shardwise.horovod.allgather import allgather_async
from shardwise.horovod.asking import wait
from shardwise.horovod.broadcast import broadcast_, broadcast_async_
from shardwise.horovod.context import current
from shardwise.horovod.process_sets import ProcessSet, global_process_set

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


def _object(data: Tensor) -> Any:
    """What `_pickled` was given, on a rank of this run: a pickle of anybody else's can run code."""
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
    """Rank `root_rank`'s `obj`, on every rank. Raises BadCall for what cannot be pickled."""
    name = name or "broadcast_object"
    is_root = current().world.rank == root_rank
    data = _pickled(obj) if is_root else None
    length = torch.tensor([0 if data is None else data.numel()])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.bytes", process_set)
    return obj if is_root else _object(data)


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
    """Every rank's `obj`, in rank order, on every rank. Raises BadCall for what cannot be
    pickled."""
    name = name or "allgather_object"
    data = _pickled(obj)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    whole = allgather_async(data, f"{name}.bytes", process_set)
    sizes: list[int] = wait(lengths).tolist()
    return [_object(part) for part in wait(whole).split(sizes)]


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
