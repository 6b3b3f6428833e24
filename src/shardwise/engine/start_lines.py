"""The lines at the start of a run that say what is on."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.assembly import Recipe, States
from shardwise.model import units
from shardwise.placement import Placement
from shardwise.world import World


def announce_engine(world: World, recipe: Recipe, states: States) -> None:
    """Two lines: the workers, transport, row and precision; the model and its state bytes."""
    if recipe.settings.quiet:
        return
    world.print(_run_line(world, recipe))
    world.print(_model_line(recipe, states))


def announce_batch(world: World, recipe: Recipe) -> None:
    """The third line, at the first backward: the batch, and what promise 1 does not cover."""
    if recipe.settings.quiet:
        return
    world.print(_batch_line(world))
    outside = outside_promise(recipe)
    if outside:
        world.print(f"  not the same on every number of workers: {'; '.join(outside)}")


def _run_line(world: World, recipe: Recipe) -> str:
    workers = (
        f"{world.size} worker{'s' if world.size > 1 else ''} on {world.host} ({world.device.type})"
    )
    transport = f"over {world.collectives.name}, " if world.size > 1 else ""
    row = f"{recipe.placement.name} ({sharded_states(recipe.placement)})"
    return f"shardwise: {workers}, {transport}{row}, {recipe.settings.precision}"


def sharded_states(placement: Placement) -> str:
    """What a placement shards, in words."""
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
    sharded = [name for state, name in names.items() if placement.is_sharded(state)]
    return (", ".join(sharded) + " sharded") if sharded else "all replicated"


def _model_line(recipe: Recipe, states: States) -> str:
    count = sum(t.parameter.numel() for t in states.parameters.tracked)
    found = sum(len(units.find_units(model)) for model in recipe.models)
    moments = max((len(g.kind.tensor_keys) for g in states.optimizer.groups), default=0)
    here = states.expected_bytes(moments)
    line = (
        f"  model: {_count(count)} parameters in {found + 1} units, state {_bytes(here)} per worker"
    )
    if recipe.placement.level:
        line += f" (replicated: {_bytes(_replicated_bytes(recipe, states, moments))})"
    return line


def _replicated_bytes(recipe: Recipe, states: States, moments: int) -> int:
    """Bytes of the same states if every rank held them whole, without padding."""
    narrow = (torch.bfloat16, torch.float16)
    total = 0
    for tracked in states.parameters.tracked:
        parameter = tracked.parameter
        is_narrow = parameter.dtype in narrow
        master = 4 if is_narrow else parameter.element_size()
        kept = moments + is_narrow + (recipe.settings.ema_decay is not None)
        total += parameter.numel() * (2 * parameter.element_size() + kept * master)
    return total


def _batch_line(world: World) -> str:
    streams = world.feed.training_streams()
    plan = streams[-1].plan if streams else None
    if plan is None or plan.batch_size is None:
        return "  batch: as the script gives it (no Loader)"
    size = world.size
    parts = f"{size} workers x {plan.micro_batches} micro-batches x "
    each = plan.batch_size / (size * plan.micro_batches)
    line = f"  batch: {plan.batch_size} = {parts}{each:g}"
    if plan.steps_per_epoch is not None:
        line += f", {plan.steps_per_epoch:,} steps per epoch"
    return line


def outside_promise(recipe: Recipe) -> list[str]:
    """What a model does that makes results depend on the number of workers."""
    found: dict[str, int] = {}
    for module in (m for model in recipe.models for m in model.modules()):
        reason = _reason(module)
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return [f"{reason} ({count})" for reason, count in found.items()]


def _reason(module: nn.Module) -> str | None:
    p = getattr(module, "p", None) or getattr(module, "dropout", None)
    if isinstance(p, float) and p > 0 and module.training:
        return "dropout in forward"
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not hasattr(module, "_group"):
        return "BatchNorm with per-worker statistics, --sync-batch-norm brings it in"
    return None


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
