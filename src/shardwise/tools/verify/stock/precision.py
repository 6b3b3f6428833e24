"""Runs a stock script in fp64, so that rounding cannot explain a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.tools.verify import watching
from shardwise.tools.verify.script import PromoteToFp64, run_backward_in
from shardwise.tools.verify.stock import zero_shards


def widen(*, promotes: bool) -> None:
    """Make fp64 the default dtype of this process, and disable features that use narrower dtypes.

    These features are autocast, loss scaling, and the mixed precision of FSDP and DeepSpeed. If
    `promotes` is True, the script's casts to narrower dtypes have no effect, and mixed arguments
    are promoted.
    """
    torch.set_default_dtype(torch.float64)
    _set_argument(torch.autocast, "enabled", False)
    _set_argument(torch.amp.GradScaler, "enabled", False)
    from torch.distributed import fsdp

    for kind in (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy):
        for name in ("param_dtype", "reduce_dtype"):
            _set_argument(kind, name, None)
    _set_argument(fsdp.MixedPrecision, "buffer_dtype", None)
    _set_argument(fsdp.MixedPrecisionPolicy, "output_dtype", None)
    zero_shards.widen()
    if promotes:
        mode = PromoteToFp64(creates=True)
        mode.__enter__()  # type: ignore[no-untyped-call]
        run_backward_in(mode)


def _set_argument(kind: Any, name: str, value: Any) -> None:
    """Override a keyword argument in every constructor call of `kind`."""
    init: Callable[..., None] = kind.__init__

    @wraps(init)
    def replaced(this: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(init).bind(this, *args, **kwargs)
        bound.arguments[name] = value
        init(*bound.args, **bound.kwargs)

    kind.__init__ = replaced


MOST = 20
"""Maximum number of logged operations."""


class NarrowOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs operations that round gradients to a dtype narrower than fp64.

    Active during a backward pass. An operation rounds if it computes narrower values from fp64
    values. If it only converts narrower values to fp64, an earlier operation has rounded them: for
    example, the derivative of a cast to fp32 is a cast of the gradient from fp32 to fp64.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _floating_dtypes((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if len(self.entries) < MOST:
            written = _floating_dtypes(result)
            narrow = (read | written) - {torch.float64}
            wide = torch.float64 in read
            if narrow and (written & narrow if wide else torch.float64 in written):
                node = torch._C._current_autograd_node()
                where = f" in {node.name()}" if node is not None else ""
                names = ", ".join(sorted(str(each).removeprefix("torch.") for each in narrow))
                line = watching.user_line() or "a library"
                self.entries[f"{func.__name__}{where} ({names}; called by {line})"] = None
        return result


def _floating_dtypes(tree: Any) -> set[torch.dtype]:
    leaves = pytree.tree_leaves(tree)
    return {e.dtype for e in leaves if isinstance(e, Tensor) and e.is_floating_point()}
