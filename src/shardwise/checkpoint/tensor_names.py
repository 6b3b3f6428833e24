"""Matches the tensor names in a file from any library to the names in a model. No I/O.

DistributedDataParallel adds the prefix `module.` to every name, and torch.compile adds `_orig_mod.`
to the names in a compiled module. A prefix is removed only if more names match without it, so a
submodule that is actually called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_WRAPPER = "module."
_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class Match:
    """Result of `match`.

    Args:
        found: Maps the model's first name of each matched tensor to its name in the file.
        missing: The model's first names of tensors that are not in the file.
        unexpected: Names in the file that the model does not have.
    """

    found: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def match(wanted: Mapping[str, Sequence[str]], held: Iterable[str]) -> Match:
    """Match the names in a file to the tensors of a model.

    Args:
        wanted: The model's names of each tensor (several for tied weights), keyed by the first one.
        held: The names in the file.
    """
    names = list(held)
    known = {name for all_names in wanted.values() for name in all_names}
    # max returns the first of equal candidates, so the simplest interpretation wins.
    best = max(_readings(names), key=lambda read: sum(read(name) in known for name in names))
    by_name = {best(name): name for name in names}
    found = {
        first: by_name[next(name for name in all_names if name in by_name)]
        for first, all_names in wanted.items()
        if any(name in by_name for name in all_names)
    }
    return Match(
        found,
        [first for first in wanted if first not in found],
        [name for name in names if best(name) not in known],
    )


def _readings(names: Sequence[str]) -> list[Callable[[str], str]]:
    """Return functions that remove possible prefixes from a name, the simplest one first."""
    readings: list[Callable[[str], str]] = [str, _uncompiled]
    # DistributedDataParallel wraps the entire model, so all names have its prefix or none does.
    if names and all(_uncompiled(name).startswith(_WRAPPER) for name in names):
        readings += [
            lambda name: name.removeprefix(_WRAPPER),
            lambda name: _uncompiled(name).removeprefix(_WRAPPER),
        ]
    return readings


def _uncompiled(name: str) -> str:
    return name.replace(_COMPILED, "")


def listed(names: Sequence[str]) -> str:
    """Return a comma-separated list of names for a message, shortened after 20 names."""
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
