"""Describes how modules are split: which tensors, along which dimension, and into which class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.layout.bucket_layout import Span
from shardwise.layout.shards import Ranges, even_ranges
from shardwise.parallel.tensor.graph_paths import AllowedOperations
from shardwise.parallel.tensor.parallel_layers import (
    ColwiseParallel,
    LocalModule,
    RowwiseParallel,
    SequenceParallelModule,
    TensorParallelModule,
    VocabParallelEmbedding,
    has_columns,
)


@dataclass(frozen=True)
class ModuleSplit:
    """Describes how a module is split.

    Args:
        name: The name of the module.
        module: The module.
        style: The class of the split module.
        tensors: Maps each split parameter's key to its split dimension and each rank's ranges.
        local_attributes: For each rank, the attributes of its part.
        ranges: The output range on each rank, or None.
        gather_output: True if `forward` gathers the output.
    """

    name: str
    module: nn.Module
    style: type[TensorParallelModule]
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]]
    local_attributes: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[Span] | None = None
    gather_output: bool = False
    allowed: AllowedOperations | None = None
    """The operations allowed before the module if a trial accepted the split, otherwise None."""


@dataclass(frozen=True)
class SplitGroup:
    """Modules that must be split together. `kind` and `name` appear in messages."""

    kind: str
    name: str
    splits: list[ModuleSplit] = field(default_factory=list)


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer with a known `forward` and its own weight.

    A layer does not count if its weight is computed in each forward pass (a parametrization).
    """
    known = type(module).forward is nn.Linear.forward or has_columns(type(module))
    return known and module._parameters.get("weight") is not None


def widths(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of a linear layer."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if has_columns(type(module)) else (columns, rows)


def range_length(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)


def even_split(
    what: str, size: int, parts: int, *, grain: int = 1, blocks: int = 1
) -> list[Ranges]:
    """Split `size` elements with `even_ranges`. Raises ModelError, naming `what`, if impossible."""
    try:
        return even_ranges(size, parts, grain=grain, blocks=blocks)
    except ValueError as error:
        raise ModelError(
            f"--tensor {parts} cannot split {what} ({error}). Leave it whole with "
            'tensor_plan={"' + what.split(" ")[0] + '": "whole"}, or use a smaller --tensor.'
        ) from None


def colwise(
    name: str, module: nn.Module, parts: Sequence[Ranges], *, gather_output: bool = False
) -> ModuleSplit:
    """Describe a linear layer's split by output features into `parts`.

    If `gather_output` is true, its `forward` gathers the output.
    """
    _check_linear(name, module)
    columns = has_columns(type(module))
    tensors = {"weight": (1 if columns else 0, parts)}
    if getattr(module, "bias", None) is not None:
        tensors["bias"] = (0, parts)
    attribute = "nf" if columns else "out_features"
    local = [{attribute: range_length(part)} for part in parts]
    # A fused layer (queries, keys, values) has several ranges per rank. `ranges` is used only to
    # gather outputs. A fused layer's outputs are never gathered, so the first range suffices.
    ranges = [part[0] for part in parts]
    return ModuleSplit(name, module, ColwiseParallel, tensors, local, ranges, gather_output)


def rowwise(name: str, module: nn.Module, parts: Sequence[Ranges]) -> ModuleSplit:
    """Describe a linear layer's split by input features into `parts`."""
    _check_linear(name, module)
    columns = has_columns(type(module))
    attribute = "nx" if columns else "in_features"
    local = [
        {attribute: range_length(part)} if hasattr(module, attribute) else {} for part in parts
    ]
    # The bias is not split, because every rank adds it once, after the sum.
    weight = {"weight": (0 if columns else 1, parts)}
    return ModuleSplit(name, module, RowwiseParallel, weight, local)


def embedding(name: str, module: nn.Module, parts: int) -> ModuleSplit:
    """Describe an embedding's split by vocabulary. Raises ModelError if it is not supported."""
    if type(module).forward is not nn.Embedding.forward:
        raise ModelError(
            f"{name} is a {type(module).__name__}, but only torch.nn.Embedding can be split by its "
            "vocabulary."
        )
    assert isinstance(module, nn.Embedding)
    # These options need rows of other ranks, or produce gradients that cannot be sharded.
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    unsupported = next((key for key in options if getattr(module, key)), None)
    if unsupported is not None:
        raise ModelError(
            f"{name} has {unsupported}={getattr(module, unsupported)}, which needs the whole "
            f'vocabulary. Leave it whole with tensor_plan={{"{name}": "whole"}}.'
        )
    ranges = even_split(f"{name} of {module.num_embeddings} rows", module.num_embeddings, parts)
    local = [{"num_embeddings": range_length(part)} for part in ranges]
    return ModuleSplit(
        name, module, VocabParallelEmbedding, {"weight": (0, ranges)}, local, [p[0] for p in ranges]
    )


def local_module(
    name: str,
    module: nn.Module,
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]],
    local_attributes: Sequence[Mapping[str, Any]],
) -> ModuleSplit:
    """Describe the split of a module whose own `forward` also works on a part."""
    return ModuleSplit(name, module, LocalModule, tensors, local_attributes)


def sequence_parallel(name: str, module: nn.Module) -> ModuleSplit:
    """Describe a module that runs on each rank's own tokens.

    The module must compute each token separately. Raises ModelError if it has submodules.
    """
    if next(module.children(), None) is not None:
        raise ModelError(
            f"{name} is a {type(module).__name__} with submodules. The style sequence_parallel is "
            "for single modules that compute token by token, such as norms. Name those modules."
        )
    return ModuleSplit(name, module, SequenceParallelModule, {})


def _check_linear(name: str, module: nn.Module) -> None:
    if not is_linear(module):
        raise ModelError(
            f"{name} is a {type(module).__name__}. colwise and rowwise split only torch.nn.Linear "
            "and the Conv1D of GPT-2, whose forwards are known."
        )
