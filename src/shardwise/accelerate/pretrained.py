"""Replaces `save_pretrained` and `resize_token_embeddings` for models with sharded parameters.

Both are methods of transformers' models. Scripts for Accelerate call `save_pretrained(...,
is_main_process=...)` on all ranks, so all ranks can gather the sharded weights and one rank writes
them. Without that argument, some ranks may not make the call. In that case the engine raises an
error that says what to write.
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
"""The attribute that marks these replacements."""


def follow(model: nn.Module) -> None:
    """Replace both methods in the classes of `model` that define them, unless already replaced."""
    for name, ours in (
        ("save_pretrained", _make_gathering),
        ("resize_token_embeddings", _make_refusing),
    ):
        for kind in type(model).__mro__:
            stock = vars(kind).get(name)
            if stock is not None:
                if not hasattr(stock, _FOLLOWED):
                    setattr(kind, name, ours(stock))
                break


def _make_gathering(stock: Method) -> Method:
    """Return a `save_pretrained` that gathers sharded weights when all ranks call it."""

    @wraps(stock)
    def save_pretrained(model: Any, *arguments: Any, **keywords: Any) -> Any:
        trained, writes = engine_of_model(model), keywords.get("is_main_process")
        has_weights = writes is None or keywords.get("state_dict") is not None
        if trained is None or not trained.engine.settings.hides_parameters:
            return stock(model, *arguments, **keywords)
        if has_weights:
            return _saved(stock, model, arguments, keywords)
        state = trained.engine.model_state_dict(model)
        if not writes:
            return None
        if not state:
            raise UsageError(
                "save_pretrained(is_main_process=True) on a rank other than 0: with --zero 3 "
                "only rank 0 gets the full weights. Write "
                "is_main_process=accelerator.is_main_process."
            )
        return _saved(stock, model, arguments, keywords | {"state_dict": state})

    setattr(save_pretrained, _FOLLOWED, True)
    return save_pretrained


def _saved(
    stock: Method, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call the `stock` method. With a `state_dict`, let it read the names of sharded modules."""
    if keywords.get("state_dict") is None:
        return stock(model, *arguments, **keywords)
    # PEFT reads a module's state_dict only for its names (modules_to_save), which is not a mistake.
    with usage_checks.names_only():
        return stock(model, *arguments, **keywords)


def _make_refusing(stock: Method) -> Method:
    """Return a `resize_token_embeddings` that raises an error while an engine trains the model."""

    @wraps(stock)
    def resize_token_embeddings(model: Any, *arguments: Any, **keywords: Any) -> Any:
        # The requested number of embeddings. The stock method may pad it afterwards.
        size = arguments[0] if arguments else keywords.get("new_num_tokens")
        if size is not None and engine_of_model(model) is not None:
            now = model.get_input_embeddings().num_embeddings
            if size != now:
                raise UsageError(
                    f"resize_token_embeddings({size}) while an engine trains the model with "
                    f"{now}: its optimizer would continue to update the old embeddings. Call it "
                    "before accelerator.prepare() or trainer.train(), or after "
                    "accelerator.free_memory(), which returns the plain model."
                )
        return stock(model, *arguments, **keywords)

    setattr(resize_token_embeddings, _FOLLOWED, True)
    return resize_token_embeddings
