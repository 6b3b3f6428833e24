"""Divides a model into pipeline stages: finds its layers, and assigns each to a stage.

A *layer* is one of the model's repeated blocks, or a module outside of them that computes by
itself: an embedding, a norm, a head. Stages are rows of layers in the order of registration. A
module without parameters (dropout, an activation) is *floating*: it runs where its input is.
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
    """A module that one stage runs."""

    name: str
    module: nn.Module

    @property
    def size(self) -> int:
        """The number of elements of its parameters."""
        return sum(p.numel() for p in self.module.parameters())


@runtime_checkable
class StagedModel(Protocol):
    """A model that says itself what each stage runs: one module for each, in order.

    Those modules share its parameters, and need not be among its own modules. Parameters that are
    in none of them are the last stage's, which computes the loss.
    """

    def modules_of_stages(self, stages: int) -> Sequence[tuple[str, nn.Module]]:
        """The modules that `stages` stages run, with names for messages, alike on all ranks."""


@dataclass(frozen=True)
class Partition:
    """The layers of each stage, and the parameters that each stage owns, that is trains.

    A parameter of several stages is owned by the first of them and sent to the others.
    """

    layers: Sequence[Layer]
    floating: Sequence[nn.Module]
    starts: Sequence[int]
    """The first layer of each stage."""
    outside_parameters: Mapping[nn.Parameter, int]
    """Parameters that lie in no layer, each with the layer before which it is used."""
    owners: dict[nn.Parameter, int] = field(default_factory=dict)
    tied: dict[nn.Parameter, list[int]] = field(default_factory=dict)
    """Tied parameters, each with the stages that use it beside its owner."""

    def __post_init__(self) -> None:
        users: dict[nn.Parameter, set[int]] = {}
        for number, layer in enumerate(self.layers):
            for parameter in layer.module.parameters():
                users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, number in self.outside_parameters.items():
            users.setdefault(parameter, set()).add(self.stage_of(number))
        for parameter, stages in users.items():
            # The first stage owns it: its forward comes first, and the value has to be sent before.
            first, *others = sorted(stages)
            self.owners[parameter] = first
            if others:
                self.tied[parameter] = others

    def stage_of(self, number: int) -> int:
        """The stage of layer `number`."""
        return sum(number >= start for start in self.starts) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def layers_of(self, stage: int) -> Sequence[Layer]:
        """The layers of a stage, in order."""
        ends = [*self.starts[1:], len(self.layers)]
        return self.layers[self.starts[stage] : ends[stage]]

    def describe_stage(self, stage: int) -> str:
        """The first and the last module of a stage."""
        names = [layer.name for layer in self.layers_of(stage)]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def find_layers(
    model: nn.Module, patterns: Sequence[str] | None
) -> tuple[list[Layer], list[nn.Module], dict[nn.Parameter, int]]:
    """The layers of `model` in order, its floating modules, and the parameters outside of layers
    with the number of the first layer in the module that has them. `patterns` name the blocks, as
    `units` do."""
    blocks = {module for _, module in find_units(model, patterns)}
    containers = {outer for outer in model.modules() if not blocks.isdisjoint(outer.modules())}
    layers: list[Layer] = []
    floating: list[nn.Module] = []
    outside_parameters: dict[nn.Parameter, int] = {}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
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
    return layers, floating, {p: min(n, len(layers) - 1) for p, n in outside_parameters.items()}


def partition_model(
    model: nn.Module,
    stages: int,
    patterns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    costs: Mapping[str, float] | None = None,
) -> Partition:
    """Divide `model` into `stages` rows of layers: before the layers that `names` name (patterns as
    of `units`), else so that the largest is as small as can be, by `costs` or by parameters.

    Raises ModelError for more stages than layers, ConfigError for a name of no layer or of several.
    """
    if isinstance(model, StagedModel):
        return _own_partition(model, stages, names)
    layers, floating, outside_parameters = find_layers(model, patterns)
    if len(layers) < stages:
        raise ModelError(
            f"{type(model).__name__} has {len(layers)} layer(s) "
            f"({_listed([layer.name or 'itself' for layer in layers])}), which are fewer than "
            f"{stages} stages. Start fewer with --pipeline, or name finer ones: "
            "--units 'encoder.layer.*'."
        )
    if names is not None:
        starts = [0, *(_layer_number(layers, name) for name in names)]
        if starts != sorted(set(starts)) or len(starts) != stages:
            raise ConfigError(
                f"--stages takes the first module of each stage but the first one, "
                f"{stages - 1} of them in the order of the layers, not {', '.join(names)}."
            )
    else:
        sizes = [costs[layer.name] if costs else float(layer.size) for layer in layers]
        starts = balanced_starts(sizes, stages)
        starts = with_trainable_stages(starts, adds_parameters(layers))
    return Partition(layers, floating, starts, outside_parameters)


def _own_partition(model: StagedModel, stages: int, names: Sequence[str] | None) -> Partition:
    """The stages that `model` names itself. Raises ConfigError where `names` names others."""
    if names is not None:
        raise ConfigError(
            f"--stages {','.join(names)}: a {type(model).__name__} says itself where its stages "
            "begin, by its partition_method. Leave --stages out."
        )
    layers = [Layer(name, module) for name, module in model.modules_of_stages(stages)]
    inside = {parameter for layer in layers for parameter in layer.module.parameters()}
    # A parameter in no stage belongs to the loss, which is computed by the last stage.
    last = {p: stages - 1 for p in cast("nn.Module", model).parameters() if p not in inside}
    return Partition(layers, [], range(stages), last)


def check_names(model: nn.Module, patterns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise ConfigError for one of `names` at which no stage can begin; see `partition_model`."""
    found, _, _ = find_layers(model, patterns)
    for name in names:
        _layer_number(found, name)


def adds_parameters(layers: Sequence[Layer]) -> list[bool]:
    """Whether each layer has a parameter to train that no earlier one has."""
    seen: set[nn.Parameter] = set()
    found = []
    for layer in layers:
        own = {p for p in layer.module.parameters() if p.requires_grad} - seen
        found.append(bool(own))
        seen |= own
    return found


def with_trainable_stages(starts: Sequence[int], adds: Sequence[bool]) -> list[int]:
    """`starts` with stages that have nothing to train begun earlier, as long as the one before
    keeps a layer; `adds` says which layers add parameters."""
    moved = list(starts)
    for stage in range(len(moved) - 1, 0, -1):
        end = moved[stage + 1] if stage + 1 < len(moved) else len(adds)
        while not any(adds[moved[stage] : end]) and moved[stage] - 1 > moved[stage - 1]:
            moved[stage] -= 1
    return moved


def _layer_number(layers: Sequence[Layer], pattern: str) -> int:
    found = [n for n, layer in enumerate(layers) if fnmatchcase(layer.name, pattern)]
    if len(found) == 1:
        return found[0]
    names = _listed([layer.name for layer in layers])
    problem = f"is {len(found)} layers" if found else "names no layer"
    raise ConfigError(f"--stages: {pattern!r} {problem}. A stage begins at one of {names}.")


def _listed(names: Sequence[str], most: int = 8) -> str:
    few = ", ".join(names[:most])
    return few if len(names) <= most else f"{few} and {len(names) - most} more"


def balanced_starts(sizes: Sequence[float], parts: int) -> list[int]:
    """The first index of each of `parts` rows of `sizes`, none empty, with the least largest sum;
    among those, with the least sum of squares."""
    edges = [0.0, *accumulate(sizes)]
    # Dynamic programming over (rows, end). Ties of the largest sum are common (equal blocks), and
    # the sum of squares then prefers even rows. The start makes all ranks choose alike.
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
    """The layer numbers of each row."""
    return [range(a, b) for a, b in pairwise([*starts, count])]
