"""How single modules are cut: which tensors along which dimension, and what they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor.graph_paths import Path
from shardwise.parallel.tensor.split_modules import (
    Colwise,
    OnTokens,
    Part,
    Rowwise,
    SplitEmbedding,
    SplitModule,
    has_columns,
)
from shardwise.shards import Range, Ranges, even_ranges


@dataclass(frozen=True)
class Cut:
    """How module `name` is split.

    `tensors` are by key the dimension and the ranges of it by rank; `local` attributes as they
    are of each rank's part. `ranges`: by rank which outputs it has, which are put together where
    it `gathers`.
    """

    name: str
    module: nn.Module
    style: type[SplitModule]
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]]
    local: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[Range] | None = None
    gathers: bool = False
    path: Path | None = None
    """What may stand before it, where that was tried."""


@dataclass(frozen=True)
class Group:
    """Modules that are split together, and what they are called in the line that tells of it."""

    what: str
    name: str
    cuts: list[Cut] = field(default_factory=list)


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear map whose forward is known, with a weight of its own: not one
    that is made anew for each forward, as by a parametrization."""
    known = type(module).forward is nn.Linear.forward or has_columns(type(module))
    return known and module._parameters.get("weight") is not None


def widths(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features of a linear map."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if has_columns(type(module)) else (columns, rows)


def length(ranges: Ranges) -> int:
    """The elements of several ranges."""
    return sum(end - first for first, end in ranges)


def evenly(what: str, size: int, parts: int, *, grain: int = 1, blocks: int = 1) -> list[Ranges]:
    """As even_ranges, with an error that names what is too small."""
    try:
        return even_ranges(size, parts, grain=grain, blocks=blocks)
    except ValueError as error:
        raise ModelError(
            f"--tensor {parts}: {what} ({error}). Leave it whole with "
            'tensor_plan={"' + what.split(" ")[0] + '": "whole"}, or take a smaller --tensor.'
        ) from None


def colwise(name: str, module: nn.Module, parts: Sequence[Ranges], *, gathers: bool = False) -> Cut:
    """The output features in `parts`; put together again where it `gathers`."""
    _check_linear(name, module)
    columns = has_columns(type(module))
    tensors = {"weight": (1 if columns else 0, parts)}
    if getattr(module, "bias", None) is not None:
        tensors["bias"] = (0, parts)
    attribute = "nf" if columns else "out_features"
    local = [{attribute: length(part)} for part in parts]
    ranges = [part[0] for part in parts]  # of several, as queries and keys, only the first
    return Cut(name, module, Colwise, tensors, local, ranges, gathers)


def rowwise(name: str, module: nn.Module, parts: Sequence[Ranges]) -> Cut:
    """The input features in `parts`."""
    _check_linear(name, module)
    columns = has_columns(type(module))
    attribute = "nx" if columns else "in_features"
    local = [{attribute: length(part)} if hasattr(module, attribute) else {} for part in parts]
    return Cut(name, module, Rowwise, {"weight": (0 if columns else 1, parts)}, local)


def embedding(name: str, module: nn.Module, parts: int) -> Cut:
    """The vocabulary in as many parts."""
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
    cut = evenly(f"{name} of {module.num_embeddings} rows", module.num_embeddings, parts)
    local = [{"num_embeddings": length(part)} for part in cut]
    return Cut(name, module, SplitEmbedding, {"weight": (0, cut)}, local, [p[0] for p in cut])


def part(
    name: str,
    module: nn.Module,
    tensors: Mapping[str, tuple[int, Sequence[Ranges]]],
    local: Sequence[Mapping[str, Any]],
) -> Cut:
    """A module that computes with its part as the plain one would."""
    return Cut(name, module, Part, tensors, local)


def on_tokens(name: str, module: nn.Module) -> Cut:
    """A module without others in it that computes each token from its own values alone."""
    if next(module.children(), None) is not None:
        raise ModelError(
            f"{name} is a {type(module).__name__} with modules in it: sequence_parallel is for "
            "single ones that compute token by token, such as norms; name those."
        )
    return Cut(name, module, OnTokens, {})


def _check_linear(name: str, module: nn.Module) -> None:
    if not is_linear(module):
        raise ModelError(
            f"{name} is a {type(module).__name__}: colwise and rowwise split torch.nn.Linear, and "
            "the Conv1D of GPT-2, whose forward is known."
        )
