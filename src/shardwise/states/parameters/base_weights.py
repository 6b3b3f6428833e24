"""Finds the frozen weights that can be stored in 4 bits: those of linear layers under adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from shardwise.states.parameters.named_parameters import NamedParameter


def find_base_weights(
    models: Iterable[nn.Module], located: Sequence[NamedParameter]
) -> set[nn.Parameter]:
    """Return the frozen weights of linear layers in `models`, as QLoRA quantises them.

    Excludes weights that another kind of layer also uses (a tied embedding), the output layer of a
    Transformers model, and the layers of PEFT adapters, which may be frozen as a reference.
    """
    excluded = {module for model in models for module in _kept_layers(model)}
    return {
        named.parameter
        for named in located
        if not named.parameter.requires_grad
        and named.dtype.is_floating_point
        and named.dtype.itemsize > 1  # float8 is as narrow
        and named.places
        and all(
            key == "weight" and _is_linear(module) and module not in excluded
            for module, key in named.places
        )
    }


def _kept_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of `model` whose weights stay in full precision."""
    for module in model.modules():
        # The Transformers model may be inside a module of the user.
        find_head = getattr(module, "get_output_embeddings", None)
        if callable(find_head) and isinstance(head := find_head(), nn.Module):
            yield from head.modules()  # rounding it would change the logits directly
        # PEFT's layers list the attributes that hold their adapters.
        for name in getattr(module, "adapter_layer_names", ()):
            if isinstance(adapter := getattr(module, name, None), nn.Module):
                yield from adapter.modules()


def _is_linear(module: nn.Module) -> bool:
    """Return whether `module` multiplies with its weight, as nn.Linear and GPT-2's Conv1D do."""
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return isinstance(module, nn.Linear) or is_conv1d
