"""Collects an engine's units, parameter groups and parameters before its first forward pass.

It also reduces a model to the first tensor-parallel rank's part, with the engine's own rules and
checks. The other ranks do not exist: a collective with them only returns a tensor of the correct
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Handle, Solo
from shardwise.comm.base import Counts
from shardwise.engine import tensor_parallel, unit_assignment
from shardwise.engine.engine_spec import EngineSpec
from shardwise.model import precision
from shardwise.parallel.expert.moe import MoE
from shardwise.parallel.expert.split_experts import (
    ExpertParallelModels,
    find_fused,
    find_layers,
    unsplit_reasons,
)
from shardwise.parallel.expert.token_share import TokenShare
from shardwise.parallel.pipeline import partition
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.states.optimizer.optimizer_kind import may_fuse
from shardwise.states.optimizer.optimizer_trial import OptimizerKinds
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.tools.plan.record import GroupRecord, LayerRecord, ParameterRecord


@dataclass(eq=False)
class ObservedParameter:
    """A parameter with its unit, group and layer.

    `arrived` is the index of the operation that completed its gradient, or -1 if it has none.
    """

    named: NamedParameter
    unit: int
    group: int
    arrived: int = -1
    layer: int = 0
    experts: int = 0
    """Number of experts in its layer, or 0 if it does not belong to an expert."""
    expert: int = -1
    """Index of its expert, or -1 if it holds all experts of its layer."""
    quantised: bool = False
    """True if it is frozen and stored in 4 bits."""


@dataclass(frozen=True)
class SpecNotes:
    """An engine's unit names, parameter groups and parameters.

    `modules` maps each module that is a unit to the unit's number.
    """

    units: list[str]
    groups: list[GroupRecord]
    parameters: list[ObservedParameter]
    modules: dict[nn.Module, int]


def note_spec(
    spec: EngineSpec, number: int, first_unit: int = 0, first_group: int = 0
) -> SpecNotes:
    """Return the units, groups and parameters of engine `number`.

    Units and groups are numbered from `first_unit` and `first_group`.
    """
    # Use the engine's own functions throughout, so that plans cannot deviate from the engine.
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
                quantised=named.parameter in spec.quantised_weights,
            )
            for named in located
        ],
        {module: first_unit + n for module, n in sections.modules.items()},
    )


def note_layers(
    spec: EngineSpec, parameters: Sequence[ObservedParameter]
) -> tuple[list[LayerRecord], dict[nn.Module, int]]:
    """Return the layers of the first model, and a map from their modules to their numbers.

    Also sets the `layer` of every parameter. A shared parameter belongs to its first layer.
    """
    model, names = spec.models[0], spec.settings.units
    layers, _, outside = partition.find_layers(model, names)
    trains = partition.adds_parameters(layers)
    owners = dict(outside)
    # Iterate in reverse, so that the first layer with a shared parameter overwrites later ones.
    for number, layer in reversed(list(enumerate(layers))):
        owners |= dict.fromkeys(layer.module.parameters(), number)
    for each in parameters:
        each.layer = owners.get(each.named.parameter, 0)
    records = [LayerRecord(each.name, each.size, t) for each, t in zip(layers, trains, strict=True)]
    return records, {layer.module: number for number, layer in enumerate(layers)}


def note_experts(
    spec: EngineSpec, parameters: Sequence[ObservedParameter]
) -> list[tuple[nn.Module, int, bool]]:
    """Return each module with experts, its number of experts, and whether they can be divided.

    Also sets `experts` and `expert` of every parameter.
    """
    found: list[tuple[nn.Module, int, bool]] = []
    owners: dict[nn.Parameter, tuple[int, int]] = {}
    for _, layer in find_layers(spec.models):
        number = len(layer.experts)
        found.append((layer, number, not any(True for _ in layer.experts.buffers())))
        for index, expert in enumerate(layer.experts):
            owners |= dict.fromkeys(expert.parameters(), (number, index))
    fused = find_fused(spec.models)
    # The engine refuses a model that computes a router loss from one worker's tokens.
    refused = any(
        getattr(getattr(model, "config", None), "output_router_logits", False)
        for model in spec.models
    )
    reasons = unsplit_reasons(fused)
    for name, module in fused.items():
        if reasons[name] is None:
            number = int(module.num_experts)  # type: ignore[arg-type]
            found.append((module, number, not refused))
            owners |= dict.fromkeys(module.parameters(), (number, -1))
    for each in parameters:
        each.experts, each.expert = owners.get(each.named.parameter, (0, -1))
    return found


def _groups_of(spec: EngineSpec, engine: int) -> tuple[list[GroupRecord], dict[nn.Parameter, int]]:
    """Return the parameter groups, and a map from each parameter to the number of its group."""
    kinds = OptimizerKinds()
    groups: list[GroupRecord] = []
    owners: dict[nn.Parameter, int] = {}
    device = torch.device("cpu")
    for number, optimizer in enumerate(spec.optimizers):
        for index, options in enumerate(optimizer.param_groups):
            if not options["params"]:
                continue
            # The optimizer is not copied (is_copied=False), so one of unknown kind counts as not
            # separable and receives full tensors.
            kind = kinds.of(optimizer, options, device, is_copied=False)
            dtype = options["params"][0].dtype
            master = torch.float32 if dtype in precision.NARROW else dtype
            owners |= dict.fromkeys(options["params"], len(groups))
            groups.append(
                GroupRecord(
                    optimizer=type(optimizer).__name__,
                    # Engines never share a bucket, so their groups need distinct numbers.
                    number=engine * 1000 + number,
                    index=index,
                    moments=tuple(sorted(kind.tensor_keys)),
                    elementwise=kind.elementwise,
                    separable=kind.separable,
                    known=kind.known,
                    fused=bool(options.get("fused"))
                    or may_fuse(optimizer, options, master, device),
                    quantised=spec.settings.quantises_state,
                    rounded=spec.settings.rounds_masters,
                )
            )
    return groups, owners


def recorded(each: ObservedParameter) -> ParameterRecord:
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
        experts=each.experts,
        expert=each.expert,
        quantised=each.quantised,
    )


def replace_in(module: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace the parameters of `module`, including parameters in lists.

    `replaced` maps each old parameter to its replacement.
    """
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter in replaced:
            module._parameters[key] = replaced[parameter]
    # RNN modules also store their weights in a list, and read them from it.
    for key, value in vars(module).items():
        if isinstance(value, list) and any(isinstance(each, nn.Parameter) for each in value):
            vars(module)[key] = [
                replaced.get(each, each) if isinstance(each, nn.Parameter) else each
                for each in value
            ]


class AbsentRanks(Solo):
    """A stand-in for a group of `size` ranks, only the first of which exists."""

    def __init__(self, size: int) -> None:
        # Collectives of Solo, a group of one rank, return their input. So shapes are correct, and
        # no other process is needed.
        super().__init__()
        self.size = size


class AbsentParts(AbsentRanks):
    """A stand-in for a context group of `size` ranks, only the first of which exists.

    Each exchange passes its number of bytes to `note`.
    """

    def __init__(self, size: int, note: Callable[[int], None]) -> None:
        super().__init__(size)
        self._note = note

    def gather_plain(self, value: Any) -> list[Any]:
        return [value] * self.size  # as if all ranks had passed the same

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        self._note(sent.numel() * sent.element_size())
        if isinstance(received, FakeTensor):
            return Handle()
        # Values of the batch, of which only the first part is known. Positions, which increase
        # along the sequence, continue in the other parts. All other values are repeated.
        own = sent[: counts[0][0]]
        steps = own.diff()
        rises = not own.is_floating_point() and bool(((steps == 0) | (steps == 1)).all())
        rise = int(own[-1] - own[0] + 1) if rises and own[-1] > own[0] else 0
        # The first part may be one token shorter than others.
        own = torch.cat((own, own[-1:] + (1 if rise else 0)))
        first = 0
        for number, row in enumerate(counts):
            received[first : first + row[0]] = own[: row[0]] + number * rise
            first += row[0]
        return Handle()


def split_first_part(
    spec: EngineSpec, plan: Mapping[str, Any] | None, parts: int, *, spreads: bool = False
) -> EngineSpec:
    """Return `spec` with its models reduced to the first of `parts` tensor-parallel parts.

    If `spreads` is true, routers and experts stay whole, as with `--expert`. Raises ModelError if
    no layer can be split, and ConfigError if the settings are incompatible with tensor parallelism.
    """
    split = TensorParallelModels(
        AbsentRanks(parts), spec.device, sequence_parallel=spec.settings.sequence_parallel
    )
    among = spec
    if spreads:
        experts = ExpertParallelModels(AbsentRanks(parts), Solo())
        for _, layer in find_layers(spec.models):
            experts.modules |= {layer, *layer.router.modules(), *layer.experts.modules()}
        experts.modules |= set(find_fused(spec.models).values())
        among = replace(spec, experts=experts)
    tensor_parallel.find_and_split(among, split, plan)
    return replace(spec, tensor=split)


def route_shares(spec: EngineSpec, modules: Sequence[nn.Module], parts: int) -> None:
    """Make modules with experts process a share of the tokens, as one of `parts` ranks would."""
    lanes = AbsentRanks(parts)
    for module in modules:
        if isinstance(module, MoE):
            assert spec.routing is not None
            module.join_run(replace(spec.routing, group=Solo(), everyone=Solo(), lanes=lanes))
            continue
        plain = module.forward

        def forward(
            tokens: Tensor, *routing: Tensor, plain: Callable[..., Tensor] = plain, **named: Tensor
        ) -> Tensor:
            share = TokenShare(lanes, len(tokens))
            own = [share.of(each) for each in (*routing, *named.values())]
            return share.joined(plain(share.of(tokens), *own))

        module.forward = forward
