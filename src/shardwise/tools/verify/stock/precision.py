"""Runs a stock script in fp64, so that rounding cannot explain a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardwise.tools.verify.script import PromoteToFp64
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
        PromoteToFp64(creates=True).__enter__()  # type: ignore[no-untyped-call]


def _set_argument(kind: Any, name: str, value: Any) -> None:
    """Override a keyword argument in every constructor call of `kind`."""
    init: Callable[..., None] = kind.__init__

    @wraps(init)
    def replaced(this: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(init).bind(this, *args, **kwargs)
        bound.arguments[name] = value
        init(*bound.args, **bound.kwargs)

    kind.__init__ = replaced
