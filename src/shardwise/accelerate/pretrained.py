"""Replaces two methods of transformers' models: `save_pretrained`, `resize_token_embeddings`.

Scripts for Accelerate call `save_pretrained(..., is_main_process=...)` on all ranks, so that all
can gather sharded weights, and one writes. Without that argument a rank may be alone, and the
engine's error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwise.bridging.trained_models import engine_of_model
from shardwise.engine import usage_checks
from shardwise.errors import UsageError

Method = Callable[..., Any]

_FOLLOWED = "_shardwise_follows"
"""The attribute that marks our methods."""


def follow(model: nn.Module) -> None:
    """Put ours before the two methods, in the classes in which `model` has them; once more does
    nothing."""
    for name, ours in (("save_pretrained", _gathering), ("resize_token_embeddings", _refusing)):
        for kind in type(model).__mro__:
            stock = vars(kind).get(name)
            if stock is not None:
                if not hasattr(stock, _FOLLOWED):
                    setattr(kind, name, ours(stock))
                break


def _gathering(stock: Method) -> Method:
    """Return a `save_pretrained` that gathers sharded weights if all ranks call it."""

    @wraps(stock)
    def save_pretrained(model: Any, *arguments: Any, **keywords: Any) -> Any:
        trained, writes = engine_of_model(model), keywords.get("is_main_process")
        has_weights = writes is None or keywords.get("state_dict") is not None
        if trained is None or not trained.engine.placement.is_sharded("parameters"):
            return stock(model, *arguments, **keywords)
        if has_weights:
            return _saved(stock, model, arguments, keywords)
        state = trained.engine.model_state_dict(model)
        if not writes:
            return None
        if not state:
            raise UsageError(
                "save_pretrained(is_main_process=True) on a rank that is not the first: with "
                "--zero 3 rank 0 has the whole weights. Write "
                "is_main_process=accelerator.is_main_process."
            )
        return _saved(stock, model, arguments, keywords | {"state_dict": state})

    setattr(save_pretrained, _FOLLOWED, True)
    return save_pretrained


def _saved(
    stock: Method, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Save a sharded model whose whole weights are in `keywords`, if they are anywhere."""
    if keywords.get("state_dict") is None:
        return stock(model, *arguments, **keywords)
    # PEFT asks a module for its state_dict to learn which names are in it (modules_to_save).
    with usage_checks.names_only():
        return stock(model, *arguments, **keywords)


def _refusing(stock: Method) -> Method:
    """Return a `resize_token_embeddings` that raises UsageError while an engine trains the
    model."""

    @wraps(stock)
    def resize_token_embeddings(model: Any, *arguments: Any, **keywords: Any) -> Any:
        # The number of embeddings that is asked for, before it is padded.
        size = arguments[0] if arguments else keywords.get("new_num_tokens")
        if size is not None and engine_of_model(model) is not None:
            now = model.get_input_embeddings().num_embeddings
            if size != now:
                raise UsageError(
                    f"resize_token_embeddings({size}) while an engine trains the model with {now}: "
                    "its optimizer would go on with the old ones. Call it before "
                    "accelerator.prepare() or trainer.train(), or after "
                    "accelerator.free_memory(), which gives the plain model back."
                )
        return stock(model, *arguments, **keywords)

    setattr(resize_token_embeddings, _FOLLOWED, True)
    return resize_token_embeddings
