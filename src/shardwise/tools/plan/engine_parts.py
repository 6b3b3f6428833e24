"""Notes the parts of an engine before any forward: its units, parameter groups and parameters.

It also splits a model into the part of the first of several tensor-parallel ranks, by the engine's
own rules and trials. The other ranks do not exist: their collectives only return shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import Solo
from shardwise.engine import tensor_parallel, unit_assignment
from shardwise.engine.engine_spec import EngineSpec
from shardwise.model import precision
from shardwise.parallel.pipeline import partition
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.states.optimizer.optimizer_kind import may_fuse
from shardwise.states.optimizer.optimizer_trial import OptimizerKinds
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.tools.plan.record import GroupRecord, LayerRecord, ParameterRecord


@dataclass(eq=False)
class ObservedParameter:
    """A parameter, and the operation after which its gradient was complete."""

    named: NamedParameter
    unit: int
    group: int
    arrived: int = -1
    layer: int = 0


@dataclass(frozen=True)
class SpecNotes:
    """The parts of an engine: units, groups, parameters.

    `modules` maps the modules that are units to their numbers.
    """

    units: list[str]
    groups: list[GroupRecord]
    parameters: list[ObservedParameter]
    modules: dict[nn.Module, int]


def note_spec(
    spec: EngineSpec, number: int, first_unit: int = 0, first_group: int = 0
) -> SpecNotes:
    """Return the notes on engine `number`. Units and groups are counted from the given numbers."""
    # Everything here uses the engine's own functions, so that a plan cannot drift away from it.
    located = spec.located()
    sections = unit_assignment.divide(spec.models, spec.prefixes, located, spec.settings.units)
    groups, owners = _groups_of(spec, number)
    return SpecNotes(
        [section.name for section in sections.sections],
        groups,
        [
            ObservedParameter(
                named,
                first_unit + sections.unit_of[named.parameter],
                first_group + owners[named.parameter] if named.parameter in owners else -1,
            )
            for named in located
        ],
        {module: first_unit + n for module, n in sections.modules.items()},
    )


def note_layers(
    spec: EngineSpec, parameters: Sequence[ObservedParameter]
) -> tuple[list[LayerRecord], dict[nn.Module, int]]:
    """Return the layers of the first model, and the number of each layer's module.

    Also sets the layer of each parameter. A shared parameter belongs to its first layer.
    """
    model, names = spec.models[0], spec.settings.units
    layers, _, outside = partition.find_layers(model, names)
    trains = partition.adds_parameters(layers)
    owners = dict(outside)
    # In reverse, so that the first layer with a parameter wins.
    for number, layer in reversed(list(enumerate(layers))):
        owners |= dict.fromkeys(layer.module.parameters(), number)
    for each in parameters:
        each.layer = owners.get(each.named.parameter, 0)
    records = [LayerRecord(each.name, each.size, t) for each, t in zip(layers, trains, strict=True)]
    return records, {layer.module: number for number, layer in enumerate(layers)}


def _groups_of(spec: EngineSpec, engine: int) -> tuple[list[GroupRecord], dict[nn.Parameter, int]]:
    """Return the parameter groups, and the number of the group that trains each parameter."""
    kinds = OptimizerKinds()
    groups: list[GroupRecord] = []
    owners: dict[nn.Parameter, int] = {}
    device = torch.device("cpu")
    for number, optimizer in enumerate(spec.optimizers):
        for index, options in enumerate(optimizer.param_groups):
            if not options["params"]:
                continue
            # An optimizer that cannot be copied gets whole tensors: it is not separable.
            kind = kinds.of(optimizer, options, device, is_copied=False)
            dtype = options["params"][0].dtype
            master = torch.float32 if dtype in precision.NARROW else dtype
            owners |= dict.fromkeys(options["params"], len(groups))
            groups.append(
                GroupRecord(
                    optimizer=type(optimizer).__name__,
                    # Two engines never share a bucket, so their groups must not look equal.
                    number=engine * 1000 + number,
                    index=index,
                    moments=tuple(sorted(kind.tensor_keys)),
                    elementwise=kind.elementwise,
                    separable=kind.separable,
                    known=kind.known,
                    fused=bool(options.get("fused"))
                    or may_fuse(optimizer, options, master, device),
                )
            )
    return groups, owners


def recorded(each: ObservedParameter) -> ParameterRecord:
    """Convert an observed parameter to its record."""
    named = each.named
    return ParameterRecord(
        name=named.name,
        shape=tuple(named.shape),
        dtype=str(named.dtype).removeprefix("torch."),
        itemsize=named.dtype.itemsize,
        unit=each.unit,
        group=each.group if named.parameter.requires_grad else -1,
        arrived=each.arrived,
        is_float=named.can_rest,
        layer=each.layer,
    )


def replace_in(module: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters of `module`, whether registered or in a list (as RNNs keep one)."""
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter in replaced:
            module._parameters[key] = replaced[parameter]
    # RNNs keep their weights in a list as well, and read them from there.
    for key, value in vars(module).items():
        if isinstance(value, list) and any(isinstance(each, nn.Parameter) for each in value):
            vars(module)[key] = [
                replaced.get(each, each) if isinstance(each, nn.Parameter) else each
                for each in value
            ]


class AbsentRanks(Solo):
    """A group of `size` ranks of which only the first exists."""

    def __init__(self, size: int) -> None:
        # A group of one rank, whose collectives return their input: shapes are right, and no other
        # process is needed.
        super().__init__()
        self.size = size


def split_first_part(spec: EngineSpec, plan: Mapping[str, Any] | None, parts: int) -> EngineSpec:
    """Return `spec` with its models reduced to the first of `parts` tensor-parallel parts.

    Raises ModelError if nothing can be split, ConfigError if settings exclude it.
    """
    split = TensorParallelModels(
        AbsentRanks(parts), spec.device, sequence_parallel=spec.settings.sequence_parallel
    )
    tensor_parallel.find_and_split(spec, split, plan)
    return replace(spec, tensor=split)
