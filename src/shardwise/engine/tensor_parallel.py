"""Layers split over the ranks of a replica: what is split, what it cannot be had with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import ConfigError, ModelError, ModelMismatch
from shardwise.parallel.tensor import known_modules
from shardwise.parallel.tensor import plan as plans
from shardwise.parallel.tensor.module_cuts import Group
from shardwise.parallel.tensor.plan import Plan
from shardwise.parallel.tensor.split_model import Split
from shardwise.world import World


def begin(world: World, settings: Settings, plan: Plan | None) -> Split | None:
    """A split of nothing yet; None where every rank has the whole model.

    Raises ConfigError for settings that cannot be had with it.
    """
    if world.tensor_size == 1:  # a plan splits nothing then, so that one script serves both
        return None
    if settings.compile:
        raise ConfigError(
            f"--tensor {world.tensor_size} and --compile cannot be had together: what ranks tell "
            "each other inside a layer cannot be compiled. Leave one of them out."
        )
    by_tokens = settings.sequence_parallel or plans.goes_by_tokens(plan or {})
    return Split(world.tensor, world.device, by_tokens=by_tokens)


def split(recipe: EngineSpec, made: Split, plan: Plan | None) -> None:
    """Find what is to be split, and let this rank have its part. Collective.

    Raises ModelError, on all ranks alike, where nothing is found, and ModelMismatch where ranks
    find different things.
    """
    parts = made.group.size
    groups, made.left_whole = _agreed(recipe, parts, plan or {})
    if not groups:
        left = "".join(f" Whole stays {words}." for words in left_in_words(made))
        raise ModelError(
            f"--tensor {parts} found nothing to split in {type(recipe.models[0]).__name__}.{left} "
            'Say what with sw.Engine(..., tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": '
            '"rowwise"}), or start without --tensor.'
        )
    made.cut(groups, recipe.models, recipe.optimizers)


def _agreed(recipe: EngineSpec, parts: int, plan: Plan) -> tuple[list[Group], dict[str, str]]:
    """What all ranks find, and why what else was tried stays whole.

    Rank 0 tries what has to be tried: a busy rank that comes to another verdict would be alone in
    its collectives.
    """
    run = recipe.world_group
    trials = known_modules.Trials()
    found = _found(recipe, parts, plan, trials) if run.rank == 0 else []
    verdicts = run.gather_objects(trials.verdicts)[0]
    if run.rank:
        trials = known_modules.Trials(verdicts)
        found = _found(recipe, parts, plan, trials)
    mine = [str(found)] if isinstance(found, ModelError) else _in_detail(found)
    told = run.gather_objects(mine)
    for rank, other in enumerate(told):
        for here, there in zip_longest(told[0], other, fillvalue="nothing more"):
            if here != there:
                raise ModelMismatch(
                    f"--tensor {parts}: ranks split different things. The first difference: rank 0 "
                    f"has {here}, rank {rank} has {there}. Give all ranks one tensor_plan and one "
                    "model."
                )
    if isinstance(found, ModelError):
        raise found
    return found, trials.left_whole()


def _found(
    recipe: EngineSpec, parts: int, plan: Plan, trials: known_modules.Trials
) -> list[Group] | ModelError:
    """What this rank finds; the error instead of raising it, which is for all ranks to do."""
    try:
        several = plans.named(recipe.models, recipe.prefixes, plan)
        groups = plans.planned(several, parts)
        taken = plans.taken(several) | {cut.module for group in groups for cut in group.cuts}
        groups += known_modules.find(recipe.models, recipe.prefixes, parts, taken, trials)
        known_modules.unfuse(recipe.models, recipe.prefixes, parts, groups)
        return groups
    except ModelError as error:
        return error


def _in_detail(groups: list[Group]) -> list[str]:
    return [
        f"{cut.name} ({cut.style.__name__}{' put together' if cut.gathers else ''}: "
        f"{', '.join(f'{key} {dim} {ranges}' for key, (dim, ranges) in cut.tensors.items())})"
        for group in groups
        for cut in group.cuts
    ]


def in_words(made: Split) -> str:
    """What is split, alike ones together: "attention blocks.*.attend (2)"."""
    told = _counted(
        " ".join(part for part in (group.what, _starred(group.name)) if part)
        for group in made.groups
    )
    if made.replica.by_tokens:
        told.append("what is between them by tokens")
    return ", ".join(told)


def left_in_words(made: Split) -> list[str]:
    """What stays whole, and why: "0.block (2), its layers did not run when it was tried"."""
    by_why: dict[str, list[str]] = {}
    for name, why in made.left_whole.items():
        by_why.setdefault(why, []).append(_starred(name) or "the model")
    return [f"{', '.join(_counted(names))}: {why}" for why, names in by_why.items()]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(several: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for each in several:
        counts[each] = counts.get(each, 0) + 1
    return [each if count == 1 else f"{each} ({count})" for each, count in counts.items()]
