"""Layers split over the ranks of a replica: what is split, what it cannot be had with."""

from __future__ import annotations

from shardwise.config import Settings
from shardwise.engine.recipe import Recipe
from shardwise.errors import ConfigError, ModelError
from shardwise.parallel import known
from shardwise.parallel import plan as plans
from shardwise.parallel.plan import Plan
from shardwise.parallel.split import Split
from shardwise.world import World


def begin(world: World, settings: Settings, plan: Plan | None) -> Split | None:
    """A split of nothing yet; None where every rank has the whole model.

    Raises ConfigError for settings that cannot be had with it.
    """
    del plan  # without --tensor a plan splits nothing, so that one script serves both
    if world.tensor_size == 1:
        return None
    if settings.compile:
        raise ConfigError(
            f"--tensor {world.tensor_size} and --compile cannot be had together: what ranks tell "
            "each other inside a layer cannot be compiled. Leave one of them out."
        )
    return Split(world.replica, world.device)


def split(recipe: Recipe, made: Split, plan: Plan | None) -> None:
    """Find what is to be split, and let this rank have its part. Collective.

    Raises ModelError where nothing is found.
    """
    parts = made.group.size
    several = plans.named(recipe.models, recipe.prefixes, plan or {})
    groups = plans.planned(several, parts)
    taken = plans.taken(several) | {cut.module for group in groups for cut in group.cuts}
    groups += known.find(recipe.models, recipe.prefixes, parts, taken)
    if not groups:
        raise ModelError(
            f"--tensor {parts} found nothing to split in {type(recipe.models[0]).__name__}. Say "
            'what with sw.Engine(..., tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": '
            '"rowwise"}), or start without --tensor.'
        )
    made.cut(groups, recipe.optimizers)
    made.check_shared(recipe.models)


def in_words(made: Split) -> str:
    """What is split, alike ones together: "attention blocks.*.attend (2)"."""
    counts: dict[str, int] = {}
    for group in made.groups:
        name = ".".join("*" if part.isdigit() else part for part in group.name.split("."))
        said = " ".join(part for part in (group.what, name) if part)
        counts[said] = counts.get(said, 0) + 1
    return ", ".join(said if count == 1 else f"{said} ({count})" for said, count in counts.items())
