"""Finds the repeated blocks of a model, which are compiled, sharded and recomputed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn


def find_units(
    model: nn.Module, patterns: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks in order of registration, by name.

    With `patterns` (module names in which * stands for one part or some of it, such as
    "encoder.layer.*") they are the modules so named instead.

    Without, a block is a child of an `nn.ModuleList` or `nn.Sequential` that has a sibling of its
    own class with parameters, and inside a block no further ones are looked for; a child of any
    other module with such a sibling (an encoder beside a decoder) is one where it has no blocks
    inside. A model without repetition has none.
    """
    if patterns is not None:
        return _named(model, patterns)
    return list(_within(model, ""))


def unknown(models: Sequence[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Those of `patterns` that name no module with parameters in any of `models`."""
    return [
        pattern for pattern in patterns if not any(_named(model, [pattern]) for model in models)
    ]


def _named(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    named = [
        (name.replace("_orig_mod.", ""), module)
        for name, module in model.named_modules()
        if name and _has_weights(module)
    ]
    return [
        (name, module)
        for name, module in named
        if any(_matches(name.split("."), pattern.split(".")) for pattern in patterns)
    ]


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if _has_weights(child)]
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    kinds = [type(child) for _, child in children]
    for name, child in children:
        below = f"{path}.{name}" if path else name
        repeated = kinds.count(type(child)) > 1 and any(True for _ in child.children())
        inner = list(_within(child, below))
        if repeated and not isinstance(child, nn.ModuleList) and (is_list or not inner):
            yield below, child
        else:
            yield from inner


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
