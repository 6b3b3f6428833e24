"""Assigns each parameter to the unit that it is gathered with, where parameters are sharded.

Each model is its units, the smallest blocks that all ranks execute, and its rest, which is a unit
of its own. A parameter that two units share belongs to the rest. What no module of the models
holds (a temperature in the loss) is a unit that is whole all the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardwise.comm import Collectives, GatherOrder
from shardwise.engine import usage_checks
from shardwise.model import module_hooks, unit_hooks
from shardwise.model.units import find_units
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.residency import Residency
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.parameters.unshard import Unit


@dataclass
class Section:
    """A unit before anything is laid out; `module` is None for what no model holds."""

    name: str
    family: int
    module: nn.Module | None
    is_rest: bool


@dataclass
class Sections:
    """The units of all models, and where each parameter is."""

    models: Sequence[nn.Module]
    sections: list[Section] = field(default_factory=list)
    unit_of: dict[nn.Parameter, int] = field(default_factory=dict)

    @property
    def modules(self) -> dict[nn.Module, int]:
        """By module, the unit that it is."""
        return {s.module: n for n, s in enumerate(self.sections) if s.module is not None}


def divide(
    models: Sequence[nn.Module],
    prefixes: Sequence[str],
    located: Sequence[NamedParameter],
    patterns: Sequence[str] | None,
) -> Sections:
    """Divide `models` into units, which `patterns` name where they are given."""
    found = Sections(models)
    for family, (model, prefix) in enumerate(zip(models, prefixes, strict=True)):
        rest = f"the rest of {prefix or type(model).__name__}"
        found.sections.append(Section(rest, family, model, True))
        for name, module in find_units(model, patterns):
            full = ".".join(part for part in (prefix, name) if part)
            if module not in found.modules:
                found.sections.append(Section(full, family, module, False))
    around = _innermost(found)
    for named in located:
        homes = {number for module, _ in named.places for number in around[module]}
        found.unit_of[named.parameter] = _home(found, homes)
    return found


def _innermost(found: Sections) -> dict[nn.Module, set[int]]:
    """By module, the unit that it lies in; several where it is a part of several."""
    around: dict[nn.Module, set[int]] = defaultdict(set)
    modules = found.modules

    def walk(module: nn.Module, number: int) -> None:
        number = modules.get(module, number)
        if number not in around[module]:
            around[module].add(number)
            for child in module.children():
                walk(child, number)

    for model in found.models:
        walk(model, modules[model])
    return around


def _home(found: Sections, homes: set[int]) -> int:
    """The one of `homes`, or the rest of the first model among them; `always` for none."""
    if len(homes) == 1:
        return homes.pop()
    if homes:
        family = min(found.sections[home].family for home in homes)
        return next(n for n, s in enumerate(found.sections) if s.is_rest and s.family == family)
    if found.sections[-1].module is not None:
        found.sections.append(Section("outside of the models", -1, None, False))
    return len(found.sections) - 1


def make_residency(
    found: Sections, parameters: ShardedParameters, group: Collectives, order: GatherOrder
) -> Residency:
    """Units over the buckets of `parameters`; `group` is for their gathers, which take turns in
    `order`. Collective."""
    units = [
        Unit(
            section.name,
            [
                s
                for s in parameters.sharded_buckets
                if found.unit_of[s.named[0].parameter] == number
            ],
            lasting=section.is_rest,
            always=section.module is None,
        )
        for number, section in enumerate(found.sections)
    ]
    return Residency(parameters, units, group, order, partial(_filled_units_in, found, units))


def _filled_units_in(found: Sections, units: Sequence[Unit], module: nn.Module) -> list[int]:
    """The numbers of the units that hold sharded parameters of `module`, in order."""
    return [n for n in units_in(found, module) if units[n].buckets and not units[n].always]


def open_doors(found: Sections, residency: Residency, doors: unit_hooks.UnitHooks) -> None:
    """Let the models' forwards gather the units that they need."""
    doors.manager = residency
    doors.attach(
        [
            (module, number)
            for model in found.models
            for module, number in unit_hooks.hooked_modules(model, found.unit_of, found.modules)
            if residency.units[number].buckets
        ]
    )


def refuse_copies(found: Sections) -> list[module_hooks.Hooked]:
    """Hooks that refuse to save what is sharded, or to load into it."""
    handles = []
    for model in found.models:
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


def units_in(found: Sections, module: nn.Module | None) -> list[int]:
    """The numbers of the units that hold parameters of `module` (None: all), in order."""
    if module is None:
        return list(range(len(found.sections)))
    return sorted({found.unit_of[p] for p in module.parameters() if p in found.unit_of})
