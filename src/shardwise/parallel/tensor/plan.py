"""Matches the patterns of the user's tensor_plan with modules, and splits those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor import split_rules
from shardwise.parallel.tensor.attention import Attention, split_attention
from shardwise.parallel.tensor.split_rules import SplitGroup

WHOLE = "whole"
SEQUENCE_PARALLEL = "sequence_parallel"

STYLES = {
    "colwise": "a linear map by its output features, whose output stays split",
    "colwise_rep": "the same, its output put together again",
    "rowwise": "a linear map by its input features, its outputs summed",
    "embedding": "an embedding by its vocabulary",
    SEQUENCE_PARALLEL: "a module that computes token by token, on each rank's tokens",
    WHOLE: "nothing of it, and of what is in it",
}

TensorPlan = Mapping[str, "str | Attention"]


@dataclass(frozen=True)
class PlannedModule:
    """A module that a pattern of the plan names."""

    name: str
    module: nn.Module
    pattern: str
    style: str | Attention


def match_modules(
    models: Sequence[nn.Module], prefixes: Sequence[str], plan: TensorPlan
) -> list[PlannedModule]:
    """The modules that `plan` names.

    Raises ModelError for a pattern that names none, and a module that several name.
    """
    _check_styles(plan)
    found: dict[nn.Module, PlannedModule] = {}
    hits = dict.fromkeys(plan, 0)
    everything = list(_modules(models, prefixes))
    for name, module in everything:
        for pattern in plan:
            # Part by part: a star must not match across a dot.
            parts, wanted = name.split("."), pattern.split(".")
            if len(parts) != len(wanted) or not all(map(fnmatchcase, parts, wanted)):
                continue
            hits[pattern] += 1
            if module in found:
                raise ModelError(
                    f"tensor_plan: {name} is named by {found[module].pattern!r} and by "
                    f"{pattern!r}. Let each module be named by one."
                )
            found[module] = PlannedModule(name, module, pattern, plan[pattern])
    for pattern, count in hits.items():
        if not count:
            tops = [
                name for name, module in everything if next(module.parameters(), None) is not None
            ]
            raise ModelError(
                f"tensor_plan: no module is called {pattern!r}. There are {', '.join(tops[:8])}"
                f"{' ...' if len(tops) > 8 else ''}; * stands for one part of a name."
            )
    return list(found.values())


def _modules(
    models: Sequence[nn.Module], prefixes: Sequence[str]
) -> Iterator[tuple[str, nn.Module]]:
    for model, prefix in zip(models, prefixes, strict=True):
        for path, module in model.named_modules():
            name = ".".join(part for part in (prefix, path) if part).replace("_orig_mod.", "")
            if name:
                yield name, module


def _check_styles(plan: TensorPlan) -> None:
    for pattern, style in plan.items():
        if not isinstance(style, Attention) and style not in STYLES:
            known = "; ".join(f"{name}: {what}" for name, what in STYLES.items())
            raise ModelError(
                f"tensor_plan: {pattern!r} has the style {style!r}. There are {known}; and "
                "sw.Attention(...)."
            )


def claimed_modules(planned: Sequence[PlannedModule]) -> set[nn.Module]:
    """The modules that the plan names, with the submodules of those that stay whole."""
    found: set[nn.Module] = set()
    for each in planned:
        found |= set(each.module.modules()) if each.style == WHOLE else {each.module}
    return found


def uses_sequence_parallel(plan: TensorPlan) -> bool:
    """Whether `plan` has a module that runs on each rank's own tokens."""
    return SEQUENCE_PARALLEL in plan.values()


def planned_groups(planned: Sequence[PlannedModule], parts: int) -> list[SplitGroup]:
    """The splits that the plan asks for, into `parts`."""
    groups = []
    for each in planned:
        if each.style == WHOLE:
            continue
        if isinstance(each.style, Attention):
            groups.append(split_attention(each.name, each.module, each.style, parts))
            continue
        groups.append(SplitGroup(each.style, each.name, [_split_of(each, parts)]))
    return groups


def _split_of(each: PlannedModule, parts: int) -> split_rules.ModuleSplit:
    if each.style == SEQUENCE_PARALLEL:
        return split_rules.sequence_parallel(each.name, each.module)
    if each.style == "embedding":
        return split_rules.embedding(each.name, each.module, parts)
    if not split_rules.is_linear(each.module):
        return split_rules.colwise(each.name, each.module, ())  # raises
    into, out = split_rules.widths(each.module)
    if each.style == "rowwise":
        ranges = split_rules.even_split(f"{each.name} of {into} input features", into, parts)
        return split_rules.rowwise(each.name, each.module, ranges)
    ranges = split_rules.even_split(f"{each.name} of {out} output features", out, parts)
    gather_output = each.style == "colwise_rep"
    return split_rules.colwise(each.name, each.module, ranges, gather_output=gather_output)
