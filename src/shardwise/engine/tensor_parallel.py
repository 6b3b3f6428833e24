"""Applies tensor parallelism to the engine's models, and rejects incompatible settings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import ModelError, ModelMismatch
from shardwise.model.activations import units_of
from shardwise.model.compilation import Compiler, compile_forward, with_unknown_sizes
from shardwise.parallel.context import attention
from shardwise.parallel.expert.split_experts import ExpertParallelModels
from shardwise.parallel.tensor import compiled_collectives, compiled_units, known_modules
from shardwise.parallel.tensor import plan as plans
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.parallel.tensor.split_rules import SplitGroup
from shardwise.world.world import World


def begin(world: World, settings: Settings, plan: TensorPlan | None) -> TensorParallelModels | None:
    """Create an empty tensor-parallel state, or return None if layers are not split.

    Raises ConfigError if settings are incompatible with tensor parallelism.
    """
    # Ignore the plan, so that the same script runs with and without --tensor.
    if world.tensor_size == 1:
        return None
    sequence_parallel = settings.sequence_parallel or plans.uses_sequence_parallel(plan or {})
    return TensorParallelModels(world.tensor, world.device, sequence_parallel=sequence_parallel)


def compiler_of(spec: EngineSpec) -> Compiler | None:
    """Return the function that compiles units, or None without `--compile`."""
    if not spec.settings.compile:
        return None
    tensor, context = spec.tensor, spec.context
    compiler: Compiler = compile_forward
    if tensor is not None:
        compiler = compiled_units.UnitCompiler(tensor.replica)
    if context is not None:
        compiler = attention.compiler_of(compiler, context.run)
    has_experts = spec.routing is not None and spec.routing.in_graphs
    if has_experts:
        compiler = with_unknown_sizes(compiler)
    communicates = tensor is not None or context is not None or has_experts
    if not communicates or compiled_units.BACKEND != "inductor":
        return compiler
    return compiled_collectives.in_order(compiler)


def find_and_split(
    spec: EngineSpec, split_models: TensorParallelModels, plan: TensorPlan | None
) -> None:
    """Find the layers to split, and replace them with this rank's parts. Collective.

    Raises on all ranks: ModelError if there is nothing to split, and ModelMismatch if ranks find
    different splits.
    """
    parts = split_models.group.size
    groups, split_models.reasons_unsplit = _agree_on_splits(spec, parts, plan or {})
    if not groups:
        left = "".join(f" Not split: {words}." for words in describe_unsplit(split_models))
        raise ModelError(
            f"--tensor {parts} found nothing to split in {type(spec.models[0]).__name__}.{left} "
            'Name layers with sw.Engine(..., tensor_plan={"blocks.*.up": "colwise", '
            '"blocks.*.down": "rowwise"}), or start without --tensor.'
        )
    if spec.settings.compile:
        units = [pair for model in spec.models for pair in units_of(model, spec.settings)]
        differing = {e.module for group in groups for e in group.splits}
        if spec.experts is not None:
            differing |= spec.experts.modules  # each rank runs them on other tokens
        compiled_units.refuse_dropout(units, differing)
    split_models.cut(groups, spec.models, spec.optimizers)


def _agree_on_splits(
    spec: EngineSpec, parts: int, plan: TensorPlan
) -> tuple[list[SplitGroup], dict[str, str]]:
    """Return the splits that all ranks agree on, and the reasons why other modules are unsplit.

    Collective.
    """
    run = spec.world_group
    trials = known_modules.SplitTrials()
    # Run the trials on rank 0 only. A trial with a different result on a busy rank would leave that
    # rank alone in the collectives of a split layer.
    splits = _find_splits(spec, parts, plan, trials) if run.rank == 0 else []
    results = run.gather_objects(trials.results)[0]
    # Other ranks use rank 0's results, and so find the same splits without running trials.
    if run.rank:
        trials = known_modules.SplitTrials(results)
        splits = _find_splits(spec, parts, plan, trials)
    # Compare errors like splits: an error on one rank must become an error on all ranks.
    mine = [str(splits)] if isinstance(splits, ModelError) else _details(splits)
    details_by_rank = run.gather_objects(mine)
    for rank, other in enumerate(details_by_rank):
        for here, there in zip_longest(details_by_rank[0], other, fillvalue="nothing more"):
            if here != there:
                raise ModelMismatch(
                    f"--tensor {parts}: ranks split different layers. The first difference: rank 0 "
                    f"has {here}, rank {rank} has {there}. Use the same tensor_plan and the same "
                    "model on all ranks."
                )
    if isinstance(splits, ModelError):
        raise splits
    return splits, trials.reasons_unsplit()


def _find_splits(
    spec: EngineSpec, parts: int, plan: TensorPlan, trials: known_modules.SplitTrials
) -> list[SplitGroup] | ModelError:
    """Return the splits that this rank finds, or the error that all ranks will raise together."""
    try:
        planned = plans.match_modules(spec.models, spec.prefixes, plan)
        groups = plans.split_by_plan(planned, parts)
        claimed = plans.modules_in_plan(planned) | {
            cut.module for group in groups for cut in group.splits
        }
        if spec.experts is not None:
            _check_experts(spec.experts, groups)
            claimed |= spec.experts.modules
        groups += known_modules.find(spec.models, spec.prefixes, parts, claimed, trials)
        known_modules.disable_fused_inference(spec.models, spec.prefixes, parts, groups)
        return groups
    except ModelError as error:
        return error


def _check_experts(experts: ExpertParallelModels, groups: Iterable[SplitGroup]) -> None:
    """Raise ModelError if the user's plan splits a layer that `--expert` assigns to one rank."""
    for cut in (cut for group in groups for cut in group.splits):
        if cut.module in experts.modules:
            raise ModelError(
                f"tensor_plan names {cut.name}, which --expert {experts.group.size} splits by "
                "experts. Remove it from the plan, or start without --expert."
            )


def _details(groups: list[SplitGroup]) -> list[str]:
    return [
        f"{cut.name} ({cut.style.__name__}{' put together' if cut.gather_output else ''}: "
        f"{', '.join(f'{key} {dim} {ranges}' for key, (dim, ranges) in cut.tensors.items())})"
        for group in groups
        for cut in group.splits
    ]


def describe_split(split_models: TensorParallelModels) -> str:
    """Describe the split layers and how often each occurs: "attention blocks.*.attend (2)"."""
    names = _counted(
        " ".join(part for part in (group.kind, _starred(group.name)) if part)
        for group in split_models.groups
    )
    if split_models.replica.sequence_parallel:
        names.append("activations between them by tokens")
    return ", ".join(names)


def describe_unsplit(split_models: TensorParallelModels) -> list[str]:
    """Describe unsplit layers with reasons: "0.block (2): its layers did not run in a trial"."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in split_models.reasons_unsplit.items():
        names_by_reason.setdefault(reason, []).append(_starred(name) or "the model")
    return [f"{', '.join(_counted(names))}: {reason}" for reason, names in names_by_reason.items()]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(planned: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for each in planned:
        counts[each] = counts.get(each, 0) + 1
    return [each if count == 1 else f"{each} ({count})" for each, count in counts.items()]
