"""Applies pipeline parallelism to the engine's model, and rejects incompatible settings."""

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
    """Create a pipeline that has no layers yet, or return None if every rank has all layers.

    Raises ConfigError if settings are incompatible with pipeline parallelism.
    """
    if settings.exact is not None and (settings.microbatches or 1) > 1:
        raise ConfigError(
            f"--exact {settings.exact} cannot be combined with --microbatches "
            f"{settings.microbatches}: both cut the batch, in different ways. Remove one of the "
            "two."
        )
    # Ignore flags that only matter with a pipeline, so that a script also runs on one worker.
    if world.pipeline_size == 1:
        return None
    size = world.pipeline_size
    if settings.compile:
        raise ConfigError(
            f"--pipeline {size} cannot be combined with --compile: the forwards decide at run time "
            "which layers a worker runs. Remove one of the two."
        )
    if len(models) > 1:
        raise ConfigError(
            f"--pipeline {size} takes one model per engine, not {len(models)}: put them into one "
            "module, or start without --pipeline."
        )
    if settings.schedule == "zero-bubble" and settings.placement.is_sharded("parameters"):
        raise ConfigError(
            "--schedule zero-bubble splits backward in two, and would gather sharded parameters "
            "(--zero 3) for both parts: write --zero 2, or --schedule 1f1b."
        )
    if settings.schedule == "zero-bubble" and settings.activations == "recomputed":
        raise ConfigError(
            "--schedule zero-bubble splits backward in two, and --activations recomputed would run "
            "every forward again for both parts: write --schedule 1f1b."
        )
    several = stages_of(settings) // size
    if several > 1 and settings.schedule in ("gpipe", "1f1b"):
        raise ConfigError(
            f"--schedule {settings.schedule} takes one stage per worker, but --stages gives "
            f"{several}: write --schedule interleaved, or name {size - 1} modules."
        )
    return PipelineGroup(world.pipeline, world.device)


def stages_of(settings: Settings) -> int:
    """Return the number of pipeline stages per replica.

    Raises ConfigError if workers would have different numbers of stages.
    """
    size = settings.pipeline
    if settings.stages is None:
        return 2 * size if settings.schedule == "interleaved" else size
    count = len(settings.stages) + 1
    if count % size:
        raise ConfigError(
            f"--stages names {len(settings.stages)} modules, which gives {count} stages, but each "
            f"of the --pipeline {size} workers needs the same number of them: name {size - 1}, or "
            f"{2 * size - 1} for two on each worker."
        )
    return count


def assign_layers(spec: EngineSpec, pipeline: PipelineGroup) -> None:
    """Assign layers to stages, in the same way on all ranks.

    Raises ModelError or ConfigError on all ranks if the model cannot be split into the number of
    stages in `spec`.
    """
    settings = spec.settings
    partition = partitions.partition_model(
        spec.models[0], stages_of(settings), settings.units, settings.stages
    )
    optimized = {p for o in spec.optimizers for group in o.param_groups for p in group["params"]}
    # An example is a temperature that only the loss function uses.
    if outside := [t.name for t in spec.located() if not t.places]:
        raise ModelError(
            f"{outside[0]} is in no model, so with --pipeline it is not known which stage uses it: "
            "make it a parameter of the model."
        )
    for stage in range(partition.stages):
        own = {p for p, owner in partition.owners.items() if owner == stage and p.requires_grad}
        if not own & optimized:
            raise ModelError(
                f"Stage {stage} ({partition.describe_stage(stage)}) has nothing to train: cut the "
                "model elsewhere with --stages, or use a smaller --pipeline."
            )
    _check_recomputed(spec, partition)
    pipeline.assign(partition)


def _check_recomputed(spec: EngineSpec, partition: Partition) -> None:
    """Raise ConfigError if a recomputed unit contains several layers.

    Recomputing the unit would send the activations between its layers a second time.
    """
    if spec.settings.activations != "recomputed":
        return
    model, layers = spec.models[0], {layer.module for layer in partition.layers}
    for name, unit in units.find_units(model) or [("", model)]:
        if any(inner in layers for inner in unit.modules() if inner is not unit):
            block = name or f"{type(model).__name__}, which has no repeated blocks,"
            raise ConfigError(
                f"--activations recomputed runs {block} again as one block, but with --pipeline it "
                "is several layers: remove --units, or --activations."
            )


def describe_stages(partition: Partition) -> str:
    """Describe the layers of each stage: "0: embed to blocks.1; 1: blocks.2 to head"."""
    return "; ".join(
        f"{stage}: {partition.describe_stage(stage)}" for stage in range(partition.stages)
    )
