"""Applies tensor parallelism to the engine's models, and checks what it excludes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import ConfigError, ModelError, ModelMismatch
from shardwise.parallel.tensor import known_modules
from shardwise.parallel.tensor import plan as plans
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.parallel.tensor.split_rules import SplitGroup
from shardwise.world.world import World


def begin(world: World, settings: Settings, plan: TensorPlan | None) -> TensorParallelModels | None:
    """An empty tensor-parallel state; None where every rank has the whole model.

    Raises ConfigError for settings that exclude it.
    """
    if world.tensor_size == 1:  # a plan splits nothing then, so that one script serves both
        return None
    if settings.compile:
        raise ConfigError(
            f"--tensor {world.tensor_size} and --compile cannot be had together: what ranks "
            "send each other inside a layer cannot be compiled. Leave one of them out."
        )
    sequence_parallel = settings.sequence_parallel or plans.uses_sequence_parallel(plan or {})
    return TensorParallelModels(world.tensor, world.device, sequence_parallel=sequence_parallel)


def find_and_split(recipe: EngineSpec, made: TensorParallelModels, plan: TensorPlan | None) -> None:
    """Find what to split, and reduce this rank's models to its parts. Collective.

    Raises ModelError, on all ranks alike, where nothing is found, and ModelMismatch where ranks
    find different splits.
    """
    parts = made.group.size
    groups, made.left_whole = _agreed(recipe, parts, plan or {})
    if not groups:
        left = "".join(f" Whole stays {words}." for words in describe_unsplit(made))
        raise ModelError(
            f"--tensor {parts} found nothing to split in {type(recipe.models[0]).__name__}.{left} "
            'Say what with sw.Engine(..., tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": '
            '"rowwise"}), or start without --tensor.'
        )
    made.cut(groups, recipe.models, recipe.optimizers)


def _agreed(
    recipe: EngineSpec, parts: int, plan: TensorPlan
) -> tuple[list[SplitGroup], dict[str, str]]:
    """The splits that all ranks find, and why tried modules stay whole.

    Rank 0 alone runs the trials: a busy rank that came to another result would be alone in its
    collectives.
    """
    run = recipe.world_group
    trials = known_modules.SplitTrials()
    found = _found(recipe, parts, plan, trials) if run.rank == 0 else []
    results = run.gather_objects(trials.results)[0]
    if run.rank:
        trials = known_modules.SplitTrials(results)
        found = _found(recipe, parts, plan, trials)
    mine = [str(found)] if isinstance(found, ModelError) else _details(found)
    found_by_rank = run.gather_objects(mine)
    for rank, other in enumerate(found_by_rank):
        for here, there in zip_longest(found_by_rank[0], other, fillvalue="nothing more"):
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
    recipe: EngineSpec, parts: int, plan: TensorPlan, trials: known_modules.SplitTrials
) -> list[SplitGroup] | ModelError:
    """The splits that this rank finds, or its error, which all ranks raise together."""
    try:
        planned = plans.match_modules(recipe.models, recipe.prefixes, plan)
        groups = plans.planned_groups(planned, parts)
        taken = plans.claimed_modules(planned) | {
            cut.module for group in groups for cut in group.splits
        }
        groups += known_modules.find(recipe.models, recipe.prefixes, parts, taken, trials)
        known_modules.disable_fused_inference(recipe.models, recipe.prefixes, parts, groups)
        return groups
    except ModelError as error:
        return error


def _details(groups: list[SplitGroup]) -> list[str]:
    return [
        f"{cut.name} ({cut.style.__name__}{' put together' if cut.gather_output else ''}: "
        f"{', '.join(f'{key} {dim} {ranges}' for key, (dim, ranges) in cut.tensors.items())})"
        for group in groups
        for cut in group.splits
    ]


def describe_split(made: TensorParallelModels) -> str:
    """What is split, equal names counted: "attention blocks.*.attend (2)"."""
    found_by_rank = _counted(
        " ".join(part for part in (group.kind, _starred(group.name)) if part)
        for group in made.groups
    )
    if made.replica.sequence_parallel:
        found_by_rank.append("what is between them by tokens")
    return ", ".join(found_by_rank)


def describe_unsplit(made: TensorParallelModels) -> list[str]:
    """What stays whole, and why: "0.block (2), its layers did not run when it was tried"."""
    by_why: dict[str, list[str]] = {}
    for name, why in made.left_whole.items():
        by_why.setdefault(why, []).append(_starred(name) or "the model")
    return [f"{', '.join(_counted(names))}: {why}" for why, names in by_why.items()]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(planned: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for each in planned:
        counts[each] = counts.get(each, 0) + 1
    return [each if count == 1 else f"{each} ({count})" for each, count in counts.items()]
