"""The repeated blocks of a model, which are compiled (and later sharded) one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks in order of registration, by name.

    A block is a child of an `nn.ModuleList` or `nn.Sequential` (or of any module) that has a
    sibling of its own class with parameters; inside a block no further ones are looked for. A
    model without repetition has none.
    """
    return list(_within(model, ""))


def _within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if _has_weights(child)]
    kinds = [type(child) for _, child in children]
    for name, child in children:
        below = f"{path}.{name}" if path else name
        repeated = kinds.count(type(child)) > 1 and any(True for _ in child.children())
        if repeated and not isinstance(child, nn.ModuleList):
            yield below, child
        else:
            yield from _within(child, below)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
