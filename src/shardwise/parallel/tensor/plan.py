"""The user's plan: which modules are split, and how, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor import module_cuts
from shardwise.parallel.tensor.attention import Attention, split_attention
from shardwise.parallel.tensor.module_cuts import Group

WHOLE = "whole"
SEQUENCE = "sequence_parallel"

STYLES = {
    "colwise": "a linear map by its output features, whose output stays split",
    "colwise_rep": "the same, its output put together again",
    "rowwise": "a linear map by its input features, its outputs summed",
    "embedding": "an embedding by its vocabulary",
    SEQUENCE: "a module that computes token by token, on each rank's tokens",
    WHOLE: "nothing of it, and of what is in it",
}

Plan = Mapping[str, "str | Attention"]


@dataclass(frozen=True)
class Named:
    """A module that a pattern of the plan names."""

    name: str
    module: nn.Module
    pattern: str
    style: str | Attention


def named(models: Sequence[nn.Module], prefixes: Sequence[str], plan: Plan) -> list[Named]:
    """The modules that `plan` names.

    Raises ModelError for a pattern that names none, and a module that several name.
    """
    _check_styles(plan)
    found: dict[nn.Module, Named] = {}
    hits = dict.fromkeys(plan, 0)
    everything = list(_modules(models, prefixes))
    for name, module in everything:
        for pattern in plan:
            if not _matches(name.split("."), pattern.split(".")):
                continue
            hits[pattern] += 1
            if module in found:
                raise ModelError(
                    f"tensor_plan: {name} is named by {found[module].pattern!r} and by "
                    f"{pattern!r}. Let each module be named by one."
                )
            found[module] = Named(name, module, pattern, plan[pattern])
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


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check_styles(plan: Plan) -> None:
    for pattern, style in plan.items():
        if not isinstance(style, Attention) and style not in STYLES:
            known = "; ".join(f"{name}: {what}" for name, what in STYLES.items())
            raise ModelError(
                f"tensor_plan: {pattern!r} has the style {style!r}. There are {known}; and "
                "sw.Attention(...)."
            )


def taken(several: Sequence[Named]) -> set[nn.Module]:
    """The modules that the plan has a word on, with what is in those that stay whole."""
    found: set[nn.Module] = set()
    for each in several:
        found |= set(each.module.modules()) if each.style == WHOLE else {each.module}
    return found


def goes_by_tokens(plan: Plan) -> bool:
    """Whether `plan` has ranks compute on some tokens each."""
    return SEQUENCE in plan.values()


def planned(several: Sequence[Named], parts: int) -> list[Group]:
    """How what the plan names is cut into `parts`."""
    groups = []
    for each in several:
        if each.style == WHOLE:
            continue
        if isinstance(each.style, Attention):
            groups.append(split_attention(each.name, each.module, each.style, parts))
            continue
        groups.append(Group(each.style, each.name, [_cut(each, parts)]))
    return groups


def _cut(each: Named, parts: int) -> module_cuts.Cut:
    if each.style == SEQUENCE:
        return module_cuts.on_tokens(each.name, each.module)
    if each.style == "embedding":
        return module_cuts.embedding(each.name, each.module, parts)
    if not module_cuts.is_linear(each.module):
        return module_cuts.colwise(each.name, each.module, ())  # raises
    into, out = module_cuts.widths(each.module)
    if each.style == "rowwise":
        ranges = module_cuts.evenly(f"{each.name} of {into} input features", into, parts)
        return module_cuts.rowwise(each.name, each.module, ranges)
    ranges = module_cuts.evenly(f"{each.name} of {out} output features", out, parts)
    gathers = each.style == "colwise_rep"
    return module_cuts.colwise(each.name, each.module, ranges, gathers=gathers)
