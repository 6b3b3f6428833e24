"""Finds a model's repeated blocks, which are compiled, sharded and recomputed separately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn


def find_units(
    model: nn.Module, patterns: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return names and modules of the model's repeated blocks, in registration order.

    If `patterns` is None:

    - A child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` is a block if it has
      parameters, submodules and a sibling of the same class. Blocks are not searched for nested
      blocks.
    - A child of any other module with such a sibling (an encoder next to a decoder) is a block only
      if it contains no blocks.
    - A model without repetition has no blocks.

    A container without a `forward` (`ModuleList`, `ModuleDict`) is never a block, because nothing
    calls it. If such a container is inside another one or matches a pattern, its children are
    considered instead.

    Args:
        model: The model to search.
        patterns: Names of the modules to return instead. A * matches one component of a name or a
            part of it, as in "encoder.layer.*".
    """
    if patterns is not None:
        return _match_names(model, patterns)
    return list(_find_blocks(model, ""))


def unknown(models: Sequence[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Return the `patterns` that match no module with parameters in any of `models`."""
    return [
        pattern
        for pattern in patterns
        if not any(_match_names(model, [pattern]) for model in models)
    ]


def _match_names(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    named = [
        (name.replace("_orig_mod.", ""), module)
        for name, module in model.named_modules()
        if name and _has_weights(module)
    ]
    found: list[tuple[str, nn.Module]] = []
    for name, module in named:
        parts = name.split(".")
        for pattern in (pattern_text.split(".") for pattern_text in patterns):
            # Match component by component, because a star must not match across a dot.
            if len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)):
                found += _callable_modules(name, module)
                break
    return found


def _find_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if getattr(module, "is_one_unit", False):
        return  # such as a mixture of experts, of which ranks run different parts
    children = [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if _has_weights(child)
    ]
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    if is_list:
        children = [block for name, child in children for block in _callable_modules(name, child)]
    kinds = [type(child) for _, child in children]
    for below, child in children:
        # A layer without children, such as a Linear, is too small to be a unit.
        repeated = kinds.count(type(child)) > 1 and any(True for _ in child.children())
        inner = list(_find_blocks(child, below))
        if repeated and _has_forward(child) and (is_list or not inner):
            yield below, child
        else:
            yield from inner


def _callable_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `module`, or if it has no `forward`, the callable modules inside it."""
    if _has_forward(module):
        yield name, module
        return
    for below, child in module.named_children():
        if _has_weights(child):
            yield from _callable_modules(f"{name}.{below}", child)


def _has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called. torch's containers cannot."""
    kind = type(module)
    overrides = kind.forward is not nn.Module.forward or kind.__call__ is not nn.Module.__call__
    return overrides or "forward" in vars(module)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
