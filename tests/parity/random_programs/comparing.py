"""Finds the differences between two runs of a program, and the first of them."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.parity.random_programs.plain import Ran
from tests.parity.random_programs.program import Program

PARAMETERS, STATE = 1e-3, 1e-6
"""Smallest scale of a tensor: rounding alone can produce gradients of that size."""


NOISE = 100.0
"""Allowed difference from plain PyTorch, in multiples of the effect of one ulp at the start.
One ulp is a single rounding, but the two runs make many roundings in another order."""


def differences(
    program: Program, ours: Ran, plain: Ran, perturbed: Sequence[Ran] = ()
) -> Iterator[tuple[int, str]]:
    """Yield the differences: the number of the step, and a description.

    `perturbed` are runs of plain PyTorch that started one ulp off. If they are far from `plain`,
    the program is unstable, and the tolerance is NOISE times that distance.
    """
    tolerance = 1e-4 if program.single else 1e-8
    for name in ("losses", "norms"):
        one, other = getattr(ours, name), getattr(plain, name)
        if len(one) != len(other):
            yield 0, f"{name}: {len(one)} of ours, {len(other)} of plain PyTorch"
        floor = max((abs(value) for _, value in other if math.isfinite(value)), default=0) * 1e-3
        for at, ((number, mine), (_, theirs)) in enumerate(zip(one, other, strict=False)):
            noise = max((abs(getattr(run, name)[at][1] - theirs) for run in perturbed), default=0)
            allowed = tolerance * max(abs(theirs), floor, 1e-12)
            if not abs(mine - theirs) <= max(allowed, NOISE * noise):
                yield number, f"{name[:-1] if name == 'norms' else 'loss'} {mine!r}, not {theirs!r}"
    for name in sorted(ours.seen.keys() | plain.seen.keys(), key=_by_step):
        number = int(name.split(":")[0])
        if name not in ours.seen or name not in plain.seen:
            yield number, f"{name} is missing on one side"
            continue
        floor = STATE if "optimizer" in name else PARAMETERS
        others = [run.seen[name] for run in perturbed if name in run.seen]
        values = ours.seen[name], plain.seen[name], others
        for words in _apart(name, *values, tolerance, floor):
            yield number, words


def _by_step(name: str) -> tuple[int, str]:
    return int(name.split(":")[0]), name


def _apart(
    name: str, ours: Any, plain: Any, perturbed: list[Any], tolerance: float, floor: float
) -> Iterator[str]:
    """Compare nested values: names and counts exactly, numbers within `tolerance`."""
    if isinstance(plain, dict):
        ours, plain = _kept(ours), _kept(plain)
        if ours.keys() != plain.keys():
            missing, further = plain.keys() - ours.keys(), ours.keys() - plain.keys()
            yield f"{name} lacks {sorted(map(str, missing))}, has {sorted(map(str, further))}"
        for key in plain:
            if key in ours:
                others = [each[key] for each in perturbed]
                values = ours[key], plain[key], others
                yield from _apart(f"{name}[{key}]", *values, tolerance, floor)
    elif isinstance(plain, list | tuple):
        if len(ours) != len(plain):
            yield f"{name} has {len(ours)} entries, not {len(plain)}"
        for number, (one, other) in enumerate(zip(ours, plain, strict=False)):
            others = [each[number] for each in perturbed]
            yield from _apart(f"{name}[{number}]", one, other, others, tolerance, floor)
    elif isinstance(plain, Tensor):
        yield from _tensors_apart(name, ours, plain, perturbed, tolerance, floor)
    elif isinstance(plain, float):
        noise = max((abs(each - plain) for each in perturbed), default=0.0)
        if not abs(ours - plain) <= max(tolerance * max(abs(plain), 1e-9), NOISE * noise):
            yield f"{name} is {ours!r}, not {plain!r}"
    elif ours != plain:
        yield f"{name} is {ours!r}, not {plain!r}"


def _kept(state: dict[Any, Any]) -> dict[Any, Any]:
    """Drop empty state: SGD without momentum has None for each parameter."""
    kept = {k: _kept(v) if isinstance(v, dict) else v for k, v in state.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}


def _tensors_apart(
    name: str,
    ours: Tensor,
    plain: Tensor,
    perturbed: list[Tensor],
    tolerance: float,
    floor: float,
) -> Iterator[str]:
    if (ours.shape, ours.dtype) != (plain.shape, plain.dtype):
        yield f"{name} is {tuple(ours.shape)} {ours.dtype}, not {tuple(plain.shape)} {plain.dtype}"
    elif plain.numel():
        scale = max(float(plain.abs().max()), floor)
        distance = float((ours - plain).abs().max()) / scale
        if plain.dtype == torch.float32:
            tolerance = max(tolerance, 1e-2)
        noise = max((float((each - plain).abs().max()) / scale for each in perturbed), default=0.0)
        if not distance <= max(tolerance, NOISE * noise):
            yield f"{name} is {distance:.1e} off"


def reason(words: str) -> str:
    """Return a message without its values, so that equal messages are counted together."""
    words = words.split("\n")[0]
    words = re.sub(r"\b[\w.]*\.(blocks|stem|head)[\w.]*|\b(blocks|stem|head)[\w.]*", "NAME", words)
    words = re.sub(r"(optimizers|models|params|model)[\[\].\w]*\d[\[\].\w]*", "NAME", words)
    words = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "N", words)
    return words[:160]
