"""What operations of the CPU do with pinned memory, told to the order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.phantom.memory import is_on_device, span
from tests.phantom.operators import leaves, written
from tests.phantom.streams import Device


class Host(TorchDispatchMode):
    """Inside it, what this thread and autograd's do on the CPU is followed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            self._follow(func, args, kwargs)
        return func(*args, **kwargs)

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in leaves((*args, *kwargs.values())) if isinstance(x, Tensor)]
        if any(map(is_on_device, tensors)):
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
