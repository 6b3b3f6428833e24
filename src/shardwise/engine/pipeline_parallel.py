"""Applies pipeline parallelism to the engine's model, and checks what it excludes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import ConfigError, ModelError
from shardwise.model import units
from shardwise.parallel.pipeline import Partition, PipelineGroup
from shardwise.parallel.pipeline import partition as partitions
from shardwise.world.world import World


def begin(world: World, settings: Settings, models: Sequence[nn.Module]) -> PipelineGroup | None:
    """A pipeline that has no layers yet; None where every rank has all layers.

    Raises ConfigError for settings that exclude it.
    """
    if settings.exact is not None and (settings.microbatches or 1) > 1:
        raise ConfigError(
            f"--exact {settings.exact} and --microbatches {settings.microbatches} cannot be had "
            "together: both cut a batch, each in its own way. Leave one of them out."
        )
    if world.pipeline_size == 1:
        return None
    size = world.pipeline_size
    if settings.compile:
        raise ConfigError(
            f"--pipeline {size} and --compile cannot be had together: which layers a worker runs "
            "is decided in their forwards. Leave one of them out."
        )
    if len(models) > 1:
        raise ConfigError(
            f"--pipeline {size} takes one model per engine, and here are {len(models)}: put them "
            "into one module, or start without --pipeline."
        )
    if settings.schedule == "zero-bubble" and settings.placement.is_sharded("parameters"):
        raise ConfigError(
            "--schedule zero-bubble runs backward in two, and sharded parameters (--zero 3) would "
            "be gathered for both: write --zero 2, or --schedule 1f1b."
        )
    if settings.schedule == "zero-bubble" and settings.activations == "recomputed":
        raise ConfigError(
            "--schedule zero-bubble runs backward in two, and --activations recomputed would run "
            "every forward again for both: write --schedule 1f1b."
        )
    several = stages_of(settings) // size
    if several > 1 and settings.schedule in ("gpipe", "1f1b"):
        raise ConfigError(
            f"--schedule {settings.schedule} takes one stage per worker, and --stages makes "
            f"{several}: write --schedule interleaved, or name {size - 1} modules."
        )
    return PipelineGroup(world.pipeline, world.device)


def stages_of(settings: Settings) -> int:
    """The number of stages of a replica. Raises ConfigError where workers would have unequal
    numbers."""
    size = settings.pipeline
    if settings.stages is None:
        return 2 * size if settings.schedule == "interleaved" else size
    count = len(settings.stages) + 1
    if count % size:
        raise ConfigError(
            f"--stages names {len(settings.stages)} modules, which makes {count} stages, and "
            f"--pipeline {size} workers have as many of them each: name {size - 1}, or "
            f"{2 * size - 1} for two on each worker."
        )
    return count


def assign_layers(recipe: EngineSpec, pipeline: PipelineGroup) -> None:
    """Assign layers to stages, alike on all ranks. Raises ModelError, ConfigError on all alike."""
    settings = recipe.settings
    made = partitions.partition_model(
        recipe.models[0], stages_of(settings), settings.units, settings.stages
    )
    optimized = {p for o in recipe.optimizers for group in o.param_groups for p in group["params"]}
    if outside := [t.name for t in recipe.located() if not t.places]:
        raise ModelError(
            f"{outside[0]} is in no model, and with --pipeline nobody knows which stage uses it: "
            "make it a parameter of the model."
        )
    for stage in range(made.stages):
        own = {p for p, owner in made.owners.items() if owner == stage and p.requires_grad}
        if not own & optimized:
            raise ModelError(
                f"Stage {stage} ({made.describe_stage(stage)}) has nothing to train: cut the model "
                "elsewhere with --stages, or start fewer with --pipeline."
            )
    _check_recomputed(recipe, made)
    pipeline.assign(made)


def _check_recomputed(recipe: EngineSpec, partition: Partition) -> None:
    """Raise ConfigError where a recomputed unit contains several layers, between which values would
    be sent again."""
    if recipe.settings.activations != "recomputed":
        return
    model, layers = recipe.models[0], {layer.module for layer in partition.layers}
    for name, unit in units.find_units(model) or [("", model)]:
        if any(inner in layers for inner in unit.modules() if inner is not unit):
            what = name or f"{type(model).__name__}, which has no repeated blocks,"
            raise ConfigError(
                f"--activations recomputed runs {what} again as one, and with --pipeline it is "
                "several layers: leave --units out, or --activations."
            )


def describe_stages(partition: Partition) -> str:
    """The layers of each stage: "0: embed to blocks.1; 1: blocks.2 to head"."""
    return "; ".join(
        f"{stage}: {partition.describe_stage(stage)}" for stage in range(partition.stages)
    )
