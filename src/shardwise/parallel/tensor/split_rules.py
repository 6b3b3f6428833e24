"""Describes how modules are split: which tensors along which dimension, and the class that
results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.layout.shards import Range, Ranges, even_ranges
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
    """The split of module `name`.

    `tensors` has by key the dimension and its ranges by rank; `local_attributes` the attributes of
    each rank's part. `ranges` has the output range of each rank; `gather_output` says that outputs
    are gathered.
    """

    name: str
    module: nn.Module
    style: type[TensorParallelModule]
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]]
    local_attributes: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[Range] | None = None
    gather_output: bool = False
    allowed: AllowedOperations | None = None
    """The operations allowed before the module, if it was tried."""


@dataclass(frozen=True)
class SplitGroup:
    """Modules that are split together, with their kind and name for messages."""

    kind: str
    name: str
    splits: list[ModuleSplit] = field(default_factory=list)


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear map whose forward is known, with a weight of its own: not one
    that is recomputed for each forward, as by a parametrization."""
    known = type(module).forward is nn.Linear.forward or has_columns(type(module))
    return known and module._parameters.get("weight") is not None


def widths(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features of a linear map."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if has_columns(type(module)) else (columns, rows)


def range_length(ranges: Ranges) -> int:
    """The number of elements in several ranges."""
    return sum(end - first for first, end in ranges)


def even_split(
    what: str, size: int, parts: int, *, grain: int = 1, blocks: int = 1
) -> list[Ranges]:
    """Call even_ranges; the error names what is too small."""
    try:
        return even_ranges(size, parts, grain=grain, blocks=blocks)
    except ValueError as error:
        raise ModelError(
            f"--tensor {parts}: {what} ({error}). Leave it whole with "
            'tensor_plan={"' + what.split(" ")[0] + '": "whole"}, or take a smaller --tensor.'
        ) from None


def colwise(
    name: str, module: nn.Module, parts: Sequence[Ranges], *, gather_output: bool = False
) -> ModuleSplit:
    """Split a linear map by output features into `parts`; gathered in forward with
    `gather_output`."""
    _check_linear(name, module)
    columns = has_columns(type(module))
    tensors = {"weight": (1 if columns else 0, parts)}
    if getattr(module, "bias", None) is not None:
        tensors["bias"] = (0, parts)
    attribute = "nf" if columns else "out_features"
    local = [{attribute: range_length(part)} for part in parts]
    ranges = [part[0] for part in parts]  # of several, as queries and keys, only the first
    return ModuleSplit(name, module, ColwiseParallel, tensors, local, ranges, gather_output)


def rowwise(name: str, module: nn.Module, parts: Sequence[Ranges]) -> ModuleSplit:
    """Split a linear map by input features into `parts`."""
    _check_linear(name, module)
    columns = has_columns(type(module))
    attribute = "nx" if columns else "in_features"
    local = [
        {attribute: range_length(part)} if hasattr(module, attribute) else {} for part in parts
    ]
    return ModuleSplit(
        name, module, RowwiseParallel, {"weight": (0 if columns else 1, parts)}, local
    )


def embedding(name: str, module: nn.Module, parts: int) -> ModuleSplit:
    """Split an embedding by its vocabulary."""
    if type(module).forward is not nn.Embedding.forward:
        raise ModelError(
            f"{name} is a {type(module).__name__}: a vocabulary is split of torch.nn.Embedding."
        )
    assert isinstance(module, nn.Embedding)
    odd = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key)]
    if odd:
        raise ModelError(
            f"{name} has {odd[0]}={getattr(module, odd[0])}, which looks at the whole vocabulary: "
            f'leave it whole with tensor_plan={{"{name}": "whole"}}.'
        )
    cut = even_split(f"{name} of {module.num_embeddings} rows", module.num_embeddings, parts)
    local = [{"num_embeddings": range_length(part)} for part in cut]
    return ModuleSplit(
        name, module, VocabParallelEmbedding, {"weight": (0, cut)}, local, [p[0] for p in cut]
    )


def local_module(
    name: str,
    module: nn.Module,
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]],
    local_attributes: Sequence[Mapping[str, Any]],
) -> ModuleSplit:
    """Split a module that computes with its part as the unsplit one would."""
    return ModuleSplit(name, module, LocalModule, tensors, local_attributes)


def sequence_parallel(name: str, module: nn.Module) -> ModuleSplit:
    """Run a module without submodules on this rank's tokens; it must compute token by token."""
    if next(module.children(), None) is not None:
        raise ModelError(
            f"{name} is a {type(module).__name__} with modules in it: sequence_parallel is for "
            "single ones that compute token by token, such as norms; name those."
        )
    return ModuleSplit(name, module, SequenceParallelModule, {})


def _check_linear(name: str, module: nn.Module) -> None:
    if not is_linear(module):
        raise ModelError(
            f"{name} is a {type(module).__name__}: colwise and rowwise split torch.nn.Linear, and "
            "the Conv1D of GPT-2, whose forward is known."
        )
