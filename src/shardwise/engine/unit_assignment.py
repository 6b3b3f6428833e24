"""Assigns each sharded parameter to the unit with which it is gathered.

A model consists of its units (the smallest blocks that all ranks execute) and the rest, which forms
one more unit. A parameter shared by two units belongs to the rest. Parameters outside all models
(such as a temperature in the loss) form a unit that is never sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.comm import GatherOrder
from shardwise.engine import usage_checks
from shardwise.model import module_hooks, unit_hooks
from shardwise.model.units import find_units
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.residency import Residency
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.parameters.unshard import Unit
from shardwise.states.shard_groups import ShardGroups


@dataclass
class Section:
    """A unit before it is laid out.

    `module` is None for the unit of parameters outside all models.
    """

    name: str
    family: int
    module: nn.Module | None
    is_rest: bool


@dataclass
class Sections:
    """The units of all models, and a mapping from each parameter to its unit."""

    models: Sequence[nn.Module]
    sections: list[Section] = field(default_factory=list)
    unit_of: dict[nn.Parameter, int] = field(default_factory=dict)

    @property
    def modules(self) -> dict[nn.Module, int]:
        """The index of each unit, by the unit's module."""
        return {s.module: n for n, s in enumerate(self.sections) if s.module is not None}


def divide(
    models: Sequence[nn.Module],
    prefixes: Sequence[str],
    located: Sequence[NamedParameter],
    patterns: Sequence[str] | None,
) -> Sections:
    """Divide `models` into units, automatically or by `patterns` of module names."""
    sections = Sections(models)
    for family, (model, prefix) in enumerate(zip(models, prefixes, strict=True)):
        # Add the rest first: if the model is itself a unit, no second section is created for it.
        rest = f"the rest of {prefix or type(model).__name__}"
        sections.sections.append(Section(rest, family, model, True))
        for name, module in find_units(model, patterns):
            # If two models share a module, it is a unit of the first one.
            full = ".".join(part for part in (prefix, name) if part)
            if module not in sections.modules:
                sections.sections.append(Section(full, family, module, False))
    around = _innermost(sections)
    for named in located:
        homes = {number for module, _ in named.places for number in around[module]}
        sections.unit_of[named.parameter] = _home(sections, homes)
    return sections


def _innermost(sections: Sections) -> dict[nn.Module, set[int]]:
    """Return the indices of the innermost units that contain each module.

    There are several if the module occurs in several units.
    """
    around: dict[nn.Module, set[int]] = defaultdict(set)
    modules = sections.modules

    def walk(module: nn.Module, number: int) -> None:
        number = modules.get(module, number)
        # A module that occurs twice may be in several units. Visit it once for each of them.
        if number not in around[module]:
            around[module].add(number)
            for child in module.children():
                walk(child, number)

    for model in sections.models:
        walk(model, modules[model])
    return around


def _home(sections: Sections, homes: set[int]) -> int:
    """Return the unit of a parameter that is used in the units `homes`.

    If `homes` has several units, this is the rest of the first model among them. If `homes` is
    empty, it is the unit that is never sharded, which is created on demand.
    """
    if len(homes) == 1:
        return homes.pop()
    if homes:
        family = min(sections.sections[home].family for home in homes)
        return next(n for n, s in enumerate(sections.sections) if s.is_rest and s.family == family)
    if sections.sections[-1].module is not None:
        sections.sections.append(Section("outside of the models", -1, None, False))
    return len(sections.sections) - 1


def make_residency(
    sections: Sections, parameters: ShardedParameters, groups: ShardGroups, order: GatherOrder
) -> Residency:
    """Create the units from the buckets of `parameters`. Collective.

    Gathers run in `groups`, in the `order` that all ranks share.
    """
    units = [
        Unit(
            section.name,
            [
                s
                for s in parameters.sharded_buckets
                if sections.unit_of[s.named[0].parameter] == number
            ],
            lasting=section.is_rest,
            always=section.module is None,
        )
        for number, section in enumerate(sections.sections)
    ]

    def sharded_units_in(module: nn.Module) -> list[int]:
        # Units without sharded parameters need no gather.
        return [n for n in units_in(sections, module) if units[n].buckets and not units[n].always]

    return Residency(parameters, units, groups, order, sharded_units_in)


def attach_unit_hooks(
    sections: Sections, residency: Residency, hooks: unit_hooks.UnitHooks
) -> None:
    """Attach hooks to the models, which gather the units needed in each forward pass."""
    hooks.manager = residency
    hooks.attach(
        [
            (module, number)
            for model in sections.models
            for module, number in unit_hooks.hooked_modules(
                model, sections.unit_of, sections.modules
            )
            if residency.units[number].buckets
        ]
    )


def refuse_copies(sections: Sections) -> list[module_hooks.Hooked]:
    """Attach hooks that reject `state_dict` and `load_state_dict` on sharded modules."""
    handles = []
    for model in sections.models:
        for module in model.modules():
            handles += [
                module_hooks.attach(
                    module.register_state_dict_pre_hook, usage_checks.refuse_state_dict
                ),
                module_hooks.attach(
                    module.register_load_state_dict_pre_hook, usage_checks.refuse_load_state_dict
                ),
            ]
    return handles


def units_in(sections: Sections, module: nn.Module | None) -> list[int]:
    """Return the sorted indices of the units with parameters of `module` (None: of all units)."""
    if module is None:
        return list(range(len(sections.sections)))
    return sorted({sections.unit_of[p] for p in module.parameters() if p in sections.unit_of})
