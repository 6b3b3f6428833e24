"""Divides a model into pipeline stages: finds its layers, and assigns each layer to a stage.

A *layer* is one of the model's repeated blocks, or a module outside the blocks that has parameters,
such as an embedding, a norm or a head. A stage is a contiguous sequence of layers in registration
order. A module without parameters (dropout, an activation) is *floating*: it runs on its input's
stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Protocol, cast, runtime_checkable

from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.model.units import find_units

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that runs on a single stage."""

    name: str
    module: nn.Module

    @property
    def size(self) -> int:
        """Total number of elements in the layer's parameters."""
        return sum(p.numel() for p in self.module.parameters())


@runtime_checkable
class StagedModel(Protocol):
    """Interface of models that define their own stages: one module per stage, in order.

    These modules share the model's parameters, but need not be submodules of the model. Parameters
    that are in none of these modules belong to the last stage, because it computes the loss.
    """

    def modules_of_stages(self, stages: int) -> Sequence[tuple[str, nn.Module]]:
        """Return the name (for messages) and the module of each stage, the same on all ranks."""


@dataclass(frozen=True)
class Partition:
    """The layers of each stage, and the parameters that each stage owns (trains).

    If several stages use a parameter, the first of these stages owns it and sends it to the others.
    """

    layers: Sequence[Layer]
    floating: Sequence[nn.Module]
    starts: Sequence[int]
    """The index of the first layer of each stage."""
    outside_parameters: Mapping[nn.Parameter, int]
    """Maps each parameter outside all layers to the index of the layer before which it is used."""
    owners: dict[nn.Parameter, int] = field(default_factory=dict)
    tied: dict[nn.Parameter, list[int]] = field(default_factory=dict)
    """Maps each tied parameter to the stages that use it, except its owner."""

    def __post_init__(self) -> None:
        users: dict[nn.Parameter, set[int]] = {}
        for number, layer in enumerate(self.layers):
            for parameter in layer.module.parameters():
                users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, number in self.outside_parameters.items():
            users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, stages in users.items():
            # The first stage is the owner, because its forward pass runs first and values are only
            # sent to later stages.
            first, *others = sorted(stages)
            self.owners[parameter] = first
            if others:
                self.tied[parameter] = others

    def stage_of(self, number: int) -> int:
        """Return the stage of the layer with index `number`."""
        return sum(number >= start for start in self.starts) - 1

    @property
    def stages(self) -> int:
        return len(self.starts)

    def layers_of(self, stage: int) -> Sequence[Layer]:
        ends = [*self.starts[1:], len(self.layers)]
        return self.layers[self.starts[stage] : ends[stage]]

    def describe_stage(self, stage: int) -> str:
        """Return the names of a stage's first and last modules, as text for messages."""
        names = [layer.name for layer in self.layers_of(stage)]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def find_layers(
    model: nn.Module, patterns: Sequence[str] | None
) -> tuple[list[Layer], list[nn.Module], dict[nn.Parameter, int]]:
    """Find the layers of `model`, its floating modules, and its parameters outside layers.

    `patterns` are the names of the repeated blocks, as in `units`. Each parameter outside layers is
    mapped to the index of the first layer in the module that holds it.
    """
    blocks = {module for _, module in find_units(model, patterns)}
    containers = {outer for outer in model.modules() if not blocks.isdisjoint(outer.modules())}
    layers: list[Layer] = []
    floating: list[nn.Module] = []
    outside_parameters: dict[nn.Parameter, int] = {}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> None:
        # A shared module is a single layer, at its first position.
        if module in seen:
            return
        seen.add(module)
        # Descend only into containers of blocks. Any other module may use its children in any
        # order, so the entire module is one layer.
        opens = module in containers or isinstance(module, _LISTS) or module is model
        if module in blocks or not opens or not any(True for _ in module.children()):
            if next(module.parameters(), None) is None:
                floating.append(module)
            else:
                layers.append(Layer(name, module))
            return
        for parameter in module._parameters.values():
            if parameter is not None:
                outside_parameters.setdefault(parameter, len(layers))
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    # A parameter after the last layer belongs to the last layer.
    return layers, floating, {p: min(n, len(layers) - 1) for p, n in outside_parameters.items()}


def partition_model(
    model: nn.Module,
    stages: int,
    patterns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    costs: Mapping[str, float] | None = None,
) -> Partition:
    """Divide `model` into stages, which are contiguous sequences of layers.

    Args:
        model: The complete model.
        stages: The number of stages.
        patterns: Names of the repeated blocks, as in `units`.
        names: The first module of each stage except the first stage (patterns as in `units`). By
            default, the cost of the most expensive stage is minimised.
        costs: The cost of each layer by name, such as its time. Defaults to its number of
            parameters.

    Raises:
        ModelError: The model has fewer layers than stages.
        ConfigError: A name matches no layer or several layers.
    """
    if isinstance(model, StagedModel):
        return _own_partition(model, stages, names)
    layers, floating, outside_parameters = find_layers(model, patterns)
    if len(layers) < stages:
        raise ModelError(
            f"{type(model).__name__} has {len(layers)} layer(s) "
            f"({_listed([layer.name or 'itself' for layer in layers])}), fewer than {stages} "
            "stages. Use fewer stages (--pipeline), or name finer layers: "
            "--units 'encoder.layer.*'."
        )
    if names is not None:
        starts = [0, *(_layer_number(layers, name) for name in names)]
        if starts != sorted(set(starts)) or len(starts) != stages:
            raise ConfigError(
                f"--stages takes the first module of each stage except the first one: "
                f"{stages - 1} modules in the order of the layers, not {', '.join(names)}."
            )
    else:
        sizes = [costs[layer.name] if costs else float(layer.size) for layer in layers]
        starts = balanced_starts(sizes, stages)
        starts = with_trainable_stages(starts, adds_parameters(layers))
    return Partition(layers, floating, starts, outside_parameters)


def _own_partition(model: StagedModel, stages: int, names: Sequence[str] | None) -> Partition:
    """Return the stages that `model` defines itself. Raises ConfigError if `names` is given."""
    if names is not None:
        raise ConfigError(
            f"--stages {','.join(names)}: a {type(model).__name__} chooses its stages by its "
            "partition_method. Remove --stages."
        )
    layers = [Layer(name, module) for name, module in model.modules_of_stages(stages)]
    inside = {parameter for layer in layers for parameter in layer.module.parameters()}
    # Parameters that are in no stage belong to the loss, which the last stage computes.
    last = {p: stages - 1 for p in cast("nn.Module", model).parameters() if p not in inside}
    return Partition(layers, [], range(stages), last)


def check_names(model: nn.Module, patterns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise ConfigError if `partition_model` would reject `names` as first modules of stages."""
    layers, _, _ = find_layers(model, patterns)
    for name in names:
        _layer_number(layers, name)


def adds_parameters(layers: Sequence[Layer]) -> list[bool]:
    """Return for each layer whether it has a trainable parameter that no earlier layer has."""
    seen: set[nn.Parameter] = set()
    adds = []
    for layer in layers:
        own = {p for p in layer.module.parameters() if p.requires_grad} - seen
        adds.append(bool(own))
        seen |= own
    return adds


def with_trainable_stages(starts: Sequence[int], adds: Sequence[bool]) -> list[int]:
    """Move a stage's start to an earlier layer if the stage would otherwise have nothing to train.

    `starts` holds each stage's first layer. `adds` is the result of `adds_parameters`. Each
    preceding stage retains at least one layer.
    """
    result = list(starts)
    for stage in range(len(result) - 1, 0, -1):
        end = result[stage + 1] if stage + 1 < len(result) else len(adds)
        while not any(adds[result[stage] : end]) and result[stage] - 1 > result[stage - 1]:
            result[stage] -= 1
    return result


def _layer_number(layers: Sequence[Layer], pattern: str) -> int:
    matches = [n for n, layer in enumerate(layers) if fnmatchcase(layer.name, pattern)]
    if len(matches) == 1:
        return matches[0]
    names = _listed([layer.name for layer in layers])
    problem = f"matches {len(matches)} layers" if matches else "matches no layer"
    raise ConfigError(f"--stages: {pattern!r} {problem}. A stage begins at one of {names}.")


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def balanced_starts(sizes: Sequence[float], parts: int) -> list[int]:
    """Divide `sizes` into contiguous parts, so that the largest sum is as small as possible.

    Returns the first index of each part. No part is empty. Ties are broken by the sum of squares.
    """
    edges = [0.0, *accumulate(sizes)]
    # Dynamic programming over (part, end). Ties of the largest sum are common, because blocks have
    # equal sizes. The sum of squares then prefers even parts. The start index breaks the remaining
    # ties, so that all ranks choose the same parts.
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, 0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, len(sizes) - (parts - part) + 1):
            best[part, end] = min(_candidates(best, edges, part, end))
    starts, end = [], len(sizes)
    for part in range(parts, 0, -1):
        end = best[part, end][2]
        starts.append(end)
    return starts[::-1]


def _candidates(
    best: Mapping[tuple[int, int], tuple[float, float, int]],
    edges: Sequence[float],
    part: int,
    end: int,
) -> Iterator[tuple[float, float, int]]:
    for start in range(part - 1, end):
        if (before := best.get((part - 1, start))) is not None:
            size = edges[end] - edges[start]
            yield max(before[0], size), before[1] + size * size, start


def ranges_of(starts: Sequence[int], count: int) -> list[range]:
    """Return each stage's range of layer indices. `starts` holds each stage's first layer."""
    return [range(a, b) for a, b in pairwise([*starts, count])]
