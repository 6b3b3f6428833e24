"""Reports to the order what CPU operations and file transfers do with pinned memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.phantom.memory import is_on_device, span
from tests.phantom.operators import leaves, written
from tests.phantom.streams import Device


class Host(TorchDispatchMode):
    """Context manager that follows the CPU operations of this thread and of autograd's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            self._follow(func, args, kwargs)
        return func(*args, **kwargs)

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in leaves((*args, *kwargs.values())) if isinstance(x, Tensor)]
        if any(map(is_on_device, tensors)) or _goes_up(kwargs):
            return
        order = Device.order
        pinned = [
            tensor
            for tensor in tensors
            if tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and order.is_pinned(tensor.untyped_storage().data_ptr())
        ]
        if pinned:
            targets = {id(tensor) for tensor in written(func, args, kwargs)}
            writes = [span(tensor) for tensor in pinned if id(tensor) in targets]
            reads = [span(tensor) for tensor in pinned if id(tensor) not in targets]
            order.by_host(func._schema.name, reads, writes)


def _goes_up(kwargs: dict[str, Any]) -> bool:
    """Return whether the result is on the device, so that the device reads."""
    return torch.device(kwargs.get("device") or "cpu").type == "cuda"


def follow_files() -> None:
    """From now on, follow file reads and writes of pinned memory in all threads."""
    for name, writes in (("preadv", True), ("pwritev", False), ("pwrite", False)):
        setattr(os, name, _followed(name, getattr(os, name), writes))


def _followed(name: str, real: Callable[..., int], writes: bool) -> Callable[..., int]:
    def call(fd: int, data: Any, *rest: Any) -> int:
        for part in data if isinstance(data, (list, tuple)) else [data]:
            memory = np.frombuffer(part, dtype=np.uint8)
            first = memory.ctypes.data
            found = Device.order.pinned(first, first + memory.nbytes) if memory.nbytes else None
            if found is not None:
                Device.order.by_host(name, *(((), [found]) if writes else ([found], ())))
        return real(fd, data, *rest)

    return call
