"""Runs a method of a module inside the module's forward, where its parameters are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def inside_forward(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`method(*args, **kwargs)`, called by `module(*args, **kwargs)` in the place of its forward.

    So the hooks by which an engine follows a model enclose a whole `training_step`, as wrappers of
    Lightning's do. Inside, `module(...)` is the module's own forward.
    """
    own = vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}

    def put_back() -> None:
        own.pop("forward", None)
        own.update(before)

    def forward(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return method(*args, **kwargs)

    own["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        put_back()
