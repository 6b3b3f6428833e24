"""Whole tensors for the user: to read, to write, to export, whatever the placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from typing import Any

import torch
from torch import nn, optim

from shardwise.engine import alike, sectioning, starting
from shardwise.engine.assembly import Recipe, States
from shardwise.errors import UsageError
from shardwise.model.export import write_safetensors


@contextmanager
def full_parameters(
    recipe: Recipe, states: States, module: nn.Module | None, *, write: bool
) -> Iterator[None]:
    """See Engine.full_parameters."""
    shown = states.shown
    written: set[int] = set()
    with torch.no_grad():
        numbers = sectioning.units_in(shown.sections, module) if shown is not None else []
        whole: Any = nullcontext({}) if shown is None else shown.residency.whole(numbers)
        with whole as buckets:
            yield
            if not write and shown is not None:
                shown.residency.check_unwritten(buckets)
            elif write:
                states.parameters.check_places()
                written = recipe.group.gather_objects(states.parameters.written())[0]
                resting = [] if shown is None else shown.residency.resting()
                tensors = alike.everything(recipe)
                starting.make_alike(
                    [t for t in tensors if not any(t is r for r in resting)], recipe.group
                )
                states.parameters.meet()
                for slab, flat in buckets.items():
                    written |= set(slab.written(flat))
                    slab.store(flat)
        if write:
            states.parameters.settle()
            states.optimizer.refresh_masters(written)


def export(
    recipe: Recipe, states: States, path: str | PathLike[str], model: nn.Module | None
) -> None:
    """See Engine.export."""
    if model is None:
        if len(recipe.models) != 1:
            raise UsageError(
                "This engine has several models: say which, engine.export(path, model)."
            )
        model = recipe.models[0]
    shown, is_main = states.shown, recipe.group.rank == 0
    if shown is None:
        whole: Any = nullcontext()
    else:
        whole = shown.residency.whole(sectioning.units_in(shown.sections, model), here=is_main)
    with whole:
        if is_main:
            write_safetensors(model, path)


def optimizer_state_dict(
    recipe: Recipe, states: States, optimizer: optim.Optimizer | None
) -> dict[str, Any]:
    """See Engine.optimizer_state_dict."""
    if optimizer is None:
        if len(recipe.optimizers) != 1:
            raise UsageError("This engine has several optimizers: say which.")
        optimizer = recipe.optimizers[0]
    # A parameter that was frozen on the way has left its state with the user's optimizer.
    held: dict[Any, Any] = dict(optimizer.state)
    held |= states.gathering.optimizer_state()
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**group, "params": members})
    return {
        "state": {number: held[p] for p, number in numbers.items() if p in held},
        "param_groups": groups,
    }
