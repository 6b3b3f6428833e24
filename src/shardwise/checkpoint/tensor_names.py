"""Matches the tensor names of a file with those of a model, whoever wrote it. Pure.

DistributedDataParallel puts `module.` before every name, torch.compile `_orig_mod.` before those
of what it compiles. Both are left out where that makes more names known; a submodule that is
really called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_WRAPPER = "module."
_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class Match:
    """`found`: by the model's first name of a tensor, the file's. `missing` are of the model,
    `unexpected` of the file."""

    found: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def match(wanted: Mapping[str, Sequence[str]], held: Iterable[str]) -> Match:
    """Match `held`, the names in a file, with the tensors `wanted`: by first name, all names
    (those of tied weights)."""
    names = list(held)
    known = {name for several in wanted.values() for name in several}
    best = max(_readings(names), key=lambda read: sum(read(name) in known for name in names))
    by_name = {best(name): name for name in names}
    found = {
        first: by_name[next(name for name in several if name in by_name)]
        for first, several in wanted.items()
        if any(name in by_name for name in several)
    }
    return Match(
        found,
        [first for first in wanted if first not in found],
        [name for name in names if best(name) not in known],
    )


def _readings(names: Sequence[str]) -> list[Callable[[str], str]]:
    """Ways to read the names, the plainest first: the first of equals is taken."""
    readings: list[Callable[[str], str]] = [str, _uncompiled]
    if names and all(_uncompiled(name).startswith(_WRAPPER) for name in names):
        readings += [
            lambda name: name.removeprefix(_WRAPPER),
            lambda name: _uncompiled(name).removeprefix(_WRAPPER),
        ]
    return readings


def _uncompiled(name: str) -> str:
    return name.replace(_COMPILED, "")


def listed(several: Sequence[str]) -> str:
    """`several` in a message, the first 20 of them."""
    shown = ", ".join(several[:20])
    return shown if len(several) <= 20 else f"{shown} and {len(several) - 20} more"
