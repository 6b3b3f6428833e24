"""Classifies torch functions: those that need only a tensor's metadata, and those that write.

Here, a function is the object that `__torch_function__` receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def operation_name(func: Any) -> str:
    """Return an operation's name for messages, such as `add_`, `.data` or `.data =`."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = f".{func.__self__.__name__}"
        return f"{attribute} =" if name == "__set__" else attribute
    return str(name).split(".")[0]


def written_arguments(what: str, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that operation `what` writes to: the first, `out`, both or neither."""
    # torch's convention: `add_` and `__iadd__` (+=) write to their first argument.
    in_place = what.endswith("_") and not what.endswith("__")
    operator = what.startswith("__i") and what[3:-2] in _OPERATORS
    first = (*args, *kwargs.values())[:1]  # torch.nn.init passes its tensor by name
    writes = in_place or operator or what in ("__setitem__", ".data =")
    return pytree.tree_leaves([first if writes else (), kwargs.get("out")])


_OPERATORS = frozenset(
    ["add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor"]
)


def functions(names: str, *of: Any) -> Iterator[Any]:
    """Yield the functions `names` of the objects `of`, if this version of torch has them."""
    return (getattr(each, name) for each in of for name in names.split() if hasattr(each, name))


_READ = frozenset(["T", "H", "mT", "mH", "real", "imag", "data"])
"""Tensor attributes that give access to values."""


def _attributes() -> Iterator[Any]:
    """Yield the getters, setters and deleters of tensor attributes that reveal no values."""
    for name in set(dir(Tensor)) - _READ:
        attribute = getattr(Tensor, name)
        if type(attribute).__name__ == "getset_descriptor":
            yield from (attribute.__get__, attribute.__set__, attribute.__delete__)


FORMAL = frozenset(
    (
        *_attributes(),
        *functions(
            "size stride dim ndimension numel nelement element_size storage_offset get_device "
            "is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference "
            "is_same_size dim_order has_names "
            "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook "
            "__len__ __hash__ __dir__ result_type _has_compatible_shallow_copy_type",
            Tensor,
            torch,
        ),
    )
)
"""Functions that neither need nor write values."""
