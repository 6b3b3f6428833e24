"""The lines at the start of a run that say what is on."""

from __future__ import annotations

import math

from torch import nn

from shardwise.engine.assembly import Recipe, States
from shardwise.model import units
from shardwise.model.precision import NARROW
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
    workers = f"{_many(world.size, 'worker')} on {world.host} ({world.device.type})"
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
    line = f"  model: {_count(count)} parameters in {_many(found + 1, 'unit')}"
    line += f", state {_bytes(here)} per worker"
    if recipe.placement.level:
        line += f" (replicated: {_bytes(_replicated_bytes(recipe, states, moments))})"
    return line


def _replicated_bytes(recipe: Recipe, states: States, moments: int) -> int:
    """Bytes of the same states if every rank held them whole, without padding."""
    total = 0
    for tracked in states.parameters.tracked:
        parameter = tracked.parameter
        is_narrow = parameter.dtype in NARROW
        master = 4 if is_narrow else parameter.element_size()
        kept = moments + is_narrow + (recipe.settings.ema_decay is not None)
        total += parameter.numel() * (2 * parameter.element_size() + kept * master)
    return total


def _batch_line(world: World) -> str:
    streams = world.feed.training_streams()
    plan = streams[-1].plan if streams else None
    if plan is None or plan.batch_size is None:
        return _unknown_batch(world)
    each = math.ceil(plan.batch_size / (world.size * plan.micro_batches))
    parts = [_many(world.size, "worker"), _many(plan.micro_batches, "micro-batch", "es")]
    up_to = "" if each * world.size * plan.micro_batches == plan.batch_size else "up to "
    line = f"  batch: {plan.batch_size} = {' x '.join(parts)} x {up_to}{each}"
    if plan.steps_per_epoch is not None:
        line += f", {plan.steps_per_epoch:,} steps per epoch"
    return line


def _unknown_batch(world: World) -> str:
    line = "  batch: as the script gives it to each worker"
    if world.size == 1 or world.feed.streams:
        return line
    return (
        f"{line}; no sw.Loader is in use, and a plain DataLoader gives every worker the whole "
        "dataset. sw.Loader(...) or world.share(batch) gives each its share."
    )


def _many(count: int, name: str, ending: str = "s") -> str:
    return f"{count} {name}{'' if count == 1 else ending}"


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
