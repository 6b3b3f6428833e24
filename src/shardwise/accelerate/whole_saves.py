"""Lets `model.save_pretrained(..., is_main_process=...)` write whole weights of sharded models.

Scripts for Accelerate call it on all ranks, and say by that argument which one writes: so all are
there to gather. Without the argument a rank may be alone, and the engine's error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwise.bridging.trained_engine import in_training
from shardwise.errors import UsageError

_NAME = "save_pretrained"
_FOLLOWED = "_shardwise_gathers"
"""The attribute by which a method that gathers is known."""


def gather_in_saves(model: nn.Module) -> None:
    """Let the class in which `model` has its `save_pretrained` gather what engines have sharded;
    once more does nothing."""
    for kind in type(model).__mro__:
        stock = vars(kind).get(_NAME)
        if stock is not None:
            if not hasattr(stock, _FOLLOWED):
                setattr(kind, _NAME, _gathering(stock))
            return


def _gathering(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def save_pretrained(model: Any, *arguments: Any, **keywords: Any) -> Any:
        writes = keywords.get("is_main_process")
        if writes is None or keywords.get("state_dict") is not None or not _is_sharded(model):
            return stock(model, *arguments, **keywords)
        (state,) = (t.engine.model_state_dict(model) for t in _trained(model))
        if not writes:
            return None
        if not state:
            raise UsageError(
                "save_pretrained(is_main_process=True) on a rank that is not the first: with "
                "--zero 3 rank 0 has the whole weights. Write "
                "is_main_process=accelerator.is_main_process."
            )
        return stock(model, *arguments, **keywords | {"state_dict": state})

    setattr(save_pretrained, _FOLLOWED, True)
    return save_pretrained


def _trained(model: nn.Module) -> list[Any]:
    """The one that trains `model`, or a model that it is a part of; none for a plain model."""
    return [t for t in in_training() if any(model in m.modules() for m in t.models)][:1]


def _is_sharded(model: nn.Module) -> bool:
    return any(each.engine.placement.is_sharded("parameters") for each in _trained(model))
