"""Makes parameters read-only while they stay gathered between a forward and its backward.

Values that a unit keeps from its forward to its backward are a temporary copy. A read of them is
right, also in a loss; a write would reach no shard, so it raises at its line. While they stay, a
parameter is of a subclass of its class, in which torch asks `__torch_function__` about every call,
and so is every view that is made of it. A read is then the business of the class that it is of:
with tensor or pipeline parallelism all ranks take part in it (parallel/tensor/parameter_uses.py).
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
    below,
    form_of,
    name_of,
    unguarded,
    write_refused,
)
from shardwise.states.parameters.torch_calls import FORMAL, what_is_done, written

PASSES_ON = True  # as in parameters_at_rest.py


class _ReadOnly:
    """Refuses writes: the base of parameters and of their views while they are read-only."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation; refuse it where it writes."""
        kwargs = kwargs or {}
        if func in FORMAL:
            return form_of(func, types, args, kwargs)
        if func == SET_DATA and args[0] is args[1]:
            return None  # model.to(device) where it is already
        what = what_is_done(func)
        for target in written(what, args, kwargs):
            if isinstance(target, _ReadOnly):
                raise write_refused(_name(target), what)
        made = below(types)(func, types, args, kwargs)
        with unguarded():
            return pytree.tree_map_only(Tensor, _Views(args, kwargs), made)


class _View(_ReadOnly, Tensor):
    """A view of the parameter that messages call `parameter`."""

    parameter: str


@cache
def read_only(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of parameters of class `own` that may be read and not written."""
    metaclass: Any = type(own)
    bases, members = (_ReadOnly, own), {"__module__": __name__, "covers": own}
    made: type[nn.Parameter] = metaclass(f"{own.__name__}ReadOnly", bases, members)
    return made


def _name(value: Any) -> str:
    return value.parameter if isinstance(value, _View) else name_of(value)


class _Views:
    """Finds which results of an operation are views of what it was given."""

    def __init__(self, *given: Any) -> None:
        leaves = pytree.tree_leaves(given)
        self._names = {_memory(leaf): _name(leaf) for leaf in leaves if isinstance(leaf, _ReadOnly)}

    def __call__(self, made: Tensor) -> Tensor:
        """`made`, as a _View where it is one."""
        name = self._names.get(_memory(made))
        if name is None or isinstance(made, _ReadOnly):
            return made
        view = made.as_subclass(_View)
        view.parameter = name
        return view


def _memory(tensor: Any) -> int:
    """The storage of a tensor; 0 where it has none.

    A tensor of a level of torch.func has none. torch refuses to write to what it wraps.
    """
    if tensor.layout is not torch.strided:
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)
