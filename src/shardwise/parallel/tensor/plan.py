"""Matches the patterns of the user's tensor_plan to modules, and describes how they are split."""

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
    "colwise": "a linear map split by output features, its output stays split",
    "colwise_rep": "the same, but its output is gathered",
    "rowwise": "a linear map split by input features, its outputs are summed",
    "embedding": "an embedding split by its vocabulary",
    SEQUENCE_PARALLEL: "a module that computes token by token, on each rank's tokens",
    WHOLE: "not split, and neither are its submodules",
}

TensorPlan = Mapping[str, "str | Attention"]


@dataclass(frozen=True)
class PlannedModule:
    """A module that matches a pattern of the plan."""

    name: str
    module: nn.Module
    pattern: str
    style: str | Attention


def match_modules(
    models: Sequence[nn.Module], prefixes: Sequence[str], plan: TensorPlan
) -> list[PlannedModule]:
    """Return the modules that match a pattern of `plan`.

    Raises ModelError if a pattern matches no module, or if several match the same module.
    """
    _check_styles(plan)
    matches: dict[nn.Module, PlannedModule] = {}
    hits = dict.fromkeys(plan, 0)
    named_modules = list(_modules(models, prefixes))
    for name, module in named_modules:
        for pattern in plan:
            # Compare part by part, because `*` must not match across a dot.
            parts, pattern_parts = name.split("."), pattern.split(".")
            if len(parts) != len(pattern_parts) or not all(map(fnmatchcase, parts, pattern_parts)):
                continue
            hits[pattern] += 1
            if module in matches:
                raise ModelError(
                    f"tensor_plan: {name} matches both {matches[module].pattern!r} and "
                    f"{pattern!r}. Each module may match only one pattern."
                )
            matches[module] = PlannedModule(name, module, pattern, plan[pattern])
    for pattern, count in hits.items():
        if not count:
            # List only modules with parameters, because activations and dropout cannot be split.
            tops = [
                name
                for name, module in named_modules
                if next(module.parameters(), None) is not None
            ]
            raise ModelError(
                f"tensor_plan: no module matches {pattern!r}. The model has {', '.join(tops[:8])}"
                f"{' ...' if len(tops) > 8 else ''}; * matches one part of a name."
            )
    return list(matches.values())


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
                f"tensor_plan: {pattern!r} has the unknown style {style!r}. Use one of {known}; or "
                "sw.Attention(...)."
            )


def modules_in_plan(planned: Sequence[PlannedModule]) -> set[nn.Module]:
    """Return the modules in the plan, including all submodules of "whole" modules."""
    modules: set[nn.Module] = set()
    for each in planned:
        modules |= set(each.module.modules()) if each.style == WHOLE else {each.module}
    return modules


def uses_sequence_parallel(plan: TensorPlan) -> bool:
    """Return whether `plan` contains a module that runs on each rank's own tokens."""
    return SEQUENCE_PARALLEL in plan.values()


def split_by_plan(planned: Sequence[PlannedModule], parts: int) -> list[SplitGroup]:
    """Describe how to split the modules in the plan into `parts` parts."""
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
        # `colwise` raises an error that names the module and its class.
        return split_rules.colwise(each.name, each.module, ())
    into, out = split_rules.widths(each.module)
    if each.style == "rowwise":
        ranges = split_rules.even_split(f"{each.name} of {into} input features", into, parts)
        return split_rules.rowwise(each.name, each.module, ranges)
    ranges = split_rules.even_split(f"{each.name} of {out} output features", out, parts)
    gather_output = each.style == "colwise_rep"
    return split_rules.colwise(each.name, each.module, ranges, gather_output=gather_output)
