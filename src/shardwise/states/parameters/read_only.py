"""Makes parameters read-only while they stay gathered between a forward pass and its backward pass.

Between the two passes, a gathered unit's parameters are a temporary copy. They can be read safely,
including in a loss. A write would not reach any shard, so it raises at the user's line.

During that time, the class of a parameter, and of every view of it, is a subclass of the original
class. Its `__torch_function__` sees every call. It forwards reads to the parameter's own class,
because with tensor or pipeline parallelism all ranks take part in a read
(parallel/tensor/parameter_uses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.states.parameters.parameters_at_rest import (
    SET_DATA,
    form_of,
    name_of,
    own_torch_function,
    unguarded,
    write_error,
)
from shardwise.states.parameters.torch_calls import FORMAL, operation_name, written_arguments

PASSES_ON = True  # as in parameters_at_rest.py


class _ReadOnly:
    """Base class of read-only parameters and their views. Rejects writes."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation. Raise if it writes to a read-only parameter or to a view of one."""
        kwargs = kwargs or {}
        if func in FORMAL:
            return form_of(func, types, args, kwargs)
        if func == SET_DATA and args[0] is args[1]:
            return None  # model.to(device), when the model is already on that device
        # Check before the operation runs, because a rejected write must not change anything.
        what = operation_name(func)
        for target in written_arguments(what, args, kwargs):
            if isinstance(target, _ReadOnly):
                raise write_error(_name(target), what)
        result = own_torch_function(types)(func, types, args, kwargs)
        # A write through a view would be lost in the same way, so make views read-only, too.
        with unguarded():
            return pytree.tree_map_only(Tensor, _Views(args, kwargs), result)


class _View(_ReadOnly, Tensor):
    """A view of the parameter named `parameter`."""

    parameter: str


@cache
def read_only(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the read-only subclass of the parameter class `own`."""
    metaclass: Any = type(own)
    bases, members = (_ReadOnly, own), {"__module__": __name__, "covers": own}
    subclass: type[nn.Parameter] = metaclass(f"{own.__name__}ReadOnly", bases, members)
    return subclass


def _name(value: Any) -> str:
    return value.parameter if isinstance(value, _View) else name_of(value)


class _Views:
    """Finds the results of an operation that are views of its read-only arguments."""

    def __init__(self, *arguments: Any) -> None:
        leaves = pytree.tree_leaves(arguments)
        self._names = {_memory(leaf): _name(leaf) for leaf in leaves if isinstance(leaf, _ReadOnly)}

    def __call__(self, result: Tensor) -> Tensor:
        """Return `result`, wrapped as a `_View` if it is a view of a read-only argument."""
        name = self._names.get(_memory(result))
        if name is None or isinstance(result, _ReadOnly):
            return result
        view = result.as_subclass(_View)
        view.parameter = name
        return view


def _memory(tensor: Any) -> int:
    """Return an identifier of a tensor's storage, or 0 if it has none."""
    if tensor.layout is not torch.strided:
        return 0
    # A tensor inside a torch.func transform. torch itself rejects writes to the tensor that it
    # wraps.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)
