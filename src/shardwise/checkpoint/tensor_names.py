"""Matches tensor names in a file from any library to the names in a model. No I/O.

DistributedDataParallel adds the prefix `module.` to every name. torch.compile, FSDP1 and
recomputation add `_orig_mod.` and the like to the names in a module that they wrap. Lightning adds
the name of the attribute that holds the model. A prefix is removed only if more names match without
it, so a submodule that is actually called `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_WRAPPER = "module."
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Name parts that wrappers of single modules add anywhere in a name."""


@dataclass(frozen=True)
class Match:
    """Result of `match`.

    Args:
        found: Maps the first model name of each matched tensor to its name in the file.
        missing: First model names of the tensors that are not in the file.
        unexpected: Names in the file that the model does not have.
    """

    found: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def match(wanted: Mapping[str, Sequence[str]], held: Iterable[str]) -> Match:
    """Match the names in a file to a model's tensors.

    Args:
        wanted: Names of each model tensor (several for tied weights), keyed by the first one.
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
    """Return functions that remove possible prefixes from a name, simplest first."""
    readings: list[Callable[[str], str]] = [str, _uncompiled]
    # A wrapper around the entire model adds its prefix to all names or to none.
    prefix = common_prefix([_uncompiled(name) for name in names])
    if prefix:
        readings += [
            lambda name: name.removeprefix(prefix),
            lambda name: _uncompiled(name).removeprefix(prefix),
        ]
    if prefix == _WRAPPER and (inner := common_prefix([readings[-1](name) for name in names])):
        readings.append(lambda name: _uncompiled(name).removeprefix(prefix).removeprefix(inner))
    if any(_ADAPTER in name for name in names):
        readings.append(_of_adapter)
    return readings


_ADAPTER = "lora_"


def _of_adapter(name: str) -> str:
    """Return a PEFT model's name for a weight that is named `name` in a PEFT file.

    In the model, the names of LoRA weights contain the adapter's name, "default".
    """
    head, dot, last = name.rpartition(".")
    if _ADAPTER in last:  # lora_embedding_A is a parameter itself, not a module
        return f"{name}.default"
    return f"{head}.default{dot}{last}" if _ADAPTER in head else name


def common_prefix(names: Sequence[str]) -> str:
    """Return the first part (such as "model.") that all names share, or "" if they share none."""
    first, dot, _ = names[0].partition(".") if names else ("", "", "")
    return first + dot if dot and all(name.startswith(first + dot) for name in names) else ""


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """Map each name to the name without the prefixes of wrappers.

    If two names would become equal, no prefix is removed.
    """
    plain = [_uncompiled(name) for name in names]
    while common_prefix(plain) == _WRAPPER:
        plain = [name.removeprefix(_WRAPPER) for name in plain]
    if len(set(plain)) < len(plain):
        plain = list(names)
    return dict(zip(names, plain, strict=True))


def _uncompiled(name: str) -> str:
    for inside in _INSIDE:
        name = name.replace(inside, "")
    return name


def listed(names: Sequence[str]) -> str:
    """Return a comma-separated list of names for a message, shortened after 20 names."""
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
