"""Whole tensors for the user: to read, to write, to export, whatever the placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from shardwise.checkpoint.export import plain_state, write_model
from shardwise.engine import consistency, initial_values, unit_assignment
from shardwise.engine.build import States
from shardwise.engine.engine_spec import Recipe
from shardwise.errors import BrokenView, UsageError


@contextmanager
def full_parameters(
    recipe: Recipe, states: States, module: nn.Module | None, *, write: bool
) -> Iterator[None]:
    """See Engine.full_parameters."""
    if recipe.is_whole:
        _check_inner(write=write, outer=recipe.is_written)
        yield  # all is whole already; what is written here is the outer block's to take in
        return
    shown = states.shown
    written: set[int] = set()
    if module is not None and (
        recipe.line is not None or any(recipe.shard_of(p) is not None for p in module.parameters())
    ):
        module = None  # forwards are the plain ones everywhere or nowhere
    with torch.no_grad():
        numbers = unit_assignment.units_in(shown.sections, module) if shown is not None else []
        whole: Any = nullcontext({}) if shown is None else shown.residency.whole(numbers)
        with whole as buckets:
            with _joined(recipe, module, write=write):
                yield
                if not write:
                    _check_unwritten(recipe, states)
            if not write and shown is not None:
                shown.residency.check_unwritten(buckets)
            elif write:
                states.parameters.check_places()
                written = _made_alike(recipe, states)
                states.parameters.meet()
                for slab, flat in buckets.items():
                    written |= set(slab.written(flat))
                    slab.store(flat)
        if write:
            states.parameters.settle()
            states.optimizer.refresh_masters(written)


def _made_alike(recipe: Recipe, states: States) -> set[int]:
    """Give every rank rank 0's values of what is whole; which parameters were written to."""
    if recipe.line is not None:  # done while all of it was there
        return set(range(len(states.parameters.tracked)))
    written: set[int] = recipe.run.gather_objects(states.parameters.written())[0]
    resting = [] if states.shown is None else states.shown.residency.resting()
    kept = [t for t in consistency.everything(recipe) if recipe.shard_of(t) is None]
    initial_values.make_alike([t for t in kept if not any(t is r for r in resting)], recipe.run)
    return written


@contextmanager
def _joined(
    recipe: Recipe, module: nn.Module | None, *, write: bool, here: bool = True
) -> Iterator[None]:
    """Inside the block a model that a replica has in parts is whole, where wanted `here`."""
    if not here:
        yield
        return
    line, split = recipe.line, recipe.split
    several = recipe.models if module is None else (module,)
    parameters = [p for each in several for p in each.parameters()]
    with ExitStack() as stack:
        if line is not None or any(recipe.shard_of(p) is not None for p in parameters):
            stack.enter_context(recipe.uses.suspended())
        if split is not None:
            group = recipe.run if write and line is None else None
            stack.enter_context(
                split.wholes(parameters, write=write, group=group, is_here=recipe.is_here)
            )
        if line is not None:
            shapes = {p: s.shape for p in parameters if (s := recipe.shard_of(p)) is not None}
            stack.enter_context(
                line.custody.wholes(recipe.models[0], parameters, shapes, write=write)
            )
        yield
        if write and line is not None:
            initial_values.make_alike(consistency.everything(recipe), recipe.run)


def _check_inner(*, write: bool, outer: bool) -> None:
    """Raise UsageError for a block that is to write inside one that is not."""
    if write and not outer:
        raise UsageError(
            "full_parameters(write=True) inside full_parameters() of layers that are split: give "
            "the outer block write=True."
        )


def _check_unwritten(recipe: Recipe, states: States) -> None:
    """Raise BrokenView, on all ranks alike, where a split parameter was written to."""
    if recipe.split is None:
        return
    written = set(recipe.split.written())
    mine = [tracked.name for tracked in recipe.located() if tracked.parameter in written]
    for name in itertools.chain.from_iterable(recipe.run.gather_objects(mine)):
        if states.shown is not None:
            states.parameters.remember()  # told once
        raise BrokenView(
            f"{name} is split over {recipe.split.group.size} ranks and was written while it was "
            "whole to be read, which reaches nothing. To write parameters: with "
            "engine.full_parameters(write=True)."
        )


def export(
    recipe: Recipe, states: States, path: str | PathLike[str], model: nn.Module | None
) -> None:
    """See Engine.export."""
    with _on_the_first(recipe, states, model, "export(path, model)") as whole:
        if recipe.run.rank == 0:
            write_model(whole, Path(path))


def model_state_dict(recipe: Recipe, states: States, model: nn.Module | None) -> dict[str, Any]:
    """See Engine.model_state_dict."""
    with _on_the_first(recipe, states, model, "model_state_dict(model)") as whole:
        return plain_state(whole) if recipe.run.rank == 0 else {}


@contextmanager
def _on_the_first(
    recipe: Recipe, states: States, model: nn.Module | None, call: str
) -> Iterator[nn.Module]:
    """Inside the block `model` (default: the only one) is whole on rank 0. Collective."""
    if model is None:
        if len(recipe.models) != 1:
            raise UsageError(f"This engine has several models: say which, engine.{call}.")
        model = recipe.models[0]
    shown, here = states.shown, recipe.group.rank == 0  # the first replica
    if recipe.is_whole:
        whole: Any = nullcontext()
        here = False
    elif shown is None:
        whole = nullcontext()
    else:
        whole = shown.residency.whole(unit_assignment.units_in(shown.sections, model), here=here)
    with whole, _joined(recipe, model, write=False, here=here):
        yield model


def only(recipe: Recipe, optimizer: optim.Optimizer | None) -> optim.Optimizer:
    """`optimizer`, or the only one. Raises UsageError where there are several, or for another."""
    if optimizer is None and len(recipe.optimizers) != 1:
        raise UsageError("This engine has several optimizers: say which.")
    if optimizer is not None and not any(optimizer is each for each in recipe.optimizers):
        raise UsageError(f"This {type(optimizer).__name__} is not one that this engine has.")
    return recipe.optimizers[0] if optimizer is None else optimizer


def optimizer_state_dict(
    recipe: Recipe, states: States, optimizer: optim.Optimizer | None
) -> dict[str, Any]:
    """See Engine.optimizer_state_dict."""
    optimizer = only(recipe, optimizer)
    # A parameter that was frozen on the way has left its state with the user's optimizer.
    held: dict[Any, Any] = dict(optimizer.state)
    held |= states.gathering.optimizer_state()
    if recipe.line is not None:
        held |= recipe.line.custody.states_elsewhere(held, recipe.optimizers)
    if recipe.split is not None:
        order = [p for group in optimizer.param_groups for p in group["params"] if p in held]
        held = {p: recipe.split.whole_state(p, held[p]) for p in order}
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**group, "params": members})
    return {
        "state": {number: held[p] for p, number in numbers.items() if p in held},
        "param_groups": groups,
    }
