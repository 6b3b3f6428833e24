"""Connects mixture-of-experts layers with the engine, and splits their experts across ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.gradient_weighting import GradientWeighting
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model import units
from shardwise.model.precision import NARROW, PRESETS
from shardwise.parallel.expert.fused_experts import FusedExperts
from shardwise.parallel.expert.moe import MoE
from shardwise.parallel.expert.planned_blocks import ExpertPlan, PlannedBlock, blocks_of
from shardwise.parallel.expert.routing_run import RoutingRun
from shardwise.parallel.expert.split_experts import (
    ExpertParallelModels,
    find_fused,
    find_layers,
    named_modules,
    unsplit_reasons,
)
from shardwise.parallel.expert.token_share import ALONE
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.states.storage import quantised_storage
from shardwise.tiers.copy_stream import to_device
from shardwise.world.world import World

CACHE_LINE = 64
"""Bytes to which torch aligns memory. Matrix products may round differently otherwise."""


def begin(
    world: World,
    settings: Settings,
    models: Sequence[nn.Module],
    plan: ExpertPlan | None,
    tensor: TensorParallelModels | None,
) -> tuple[RoutingRun | None, ExpertParallelModels | None, ExpertParallelModels | None]:
    """Find the models' mixture-of-experts layers.

    Returns the RoutingRun that connects the layers, and two ExpertParallelModels, of which one is
    None. The first has not split anything yet; it is None if every rank holds all experts. The
    second is for exact mode if every rank holds all experts, because the layers must run the same
    code as if they were split. All are None if there are no layers. The call is collective if there
    are layers.

    Raises ModelError if there are no experts to split, and ConfigError if settings are incompatible
    with mixture-of-experts layers.
    """
    layers = find_layers(models)
    size = world.expert_size
    # On any number of ranks, so that a typo does not first show up in the large run.
    planned = blocks_of(named_modules(models), plan or {})
    is_exact = settings.exact is not None
    found = None
    try:
        if size > 1 or is_exact:
            found = _find_experts(world, models, layers, planned, is_exact=is_exact)
            layers += [(block.name, block.layer) for block in planned]
        _check(world, settings, layers, models)
        if size > 1 and found is not None and is_exact:
            _check_exact(world, settings, models, found)
    except (ConfigError, ModelError):  # on all ranks
        _restore_blocks(planned)
        raise
    if not layers and (found is None or not found.fused):
        return None, None, None
    split = found if size > 1 else None
    if any(layer.has_losses or layer.bias_rate for _, layer in layers):
        _check_islands(world)
    # Only create channels that are used, because that is collective.
    counts = split is not None or any(layer.has_losses for _, layer in layers)
    everyone = world.routing_channel if counts and not is_exact else world.data
    run = RoutingRun(
        world.expert,
        ALONE if is_exact else everyone,
        world.current_batch,
        is_exact=is_exact,
        in_stages=world.pipeline_size > 1,
        in_graphs=settings.compile and not is_exact,
    )
    if split is None:
        # All ranks of a replica route the same tokens.
        run.reports = world.tensor_rank == 0
    elif tensor is not None:
        run.lanes = tensor.group
        # Ranks run different rows, so dropout in experts must not advance common generators.
        run.own_randomness = tensor.replica.randomness.region
    run.layers = dict(layers) | dict(() if found is None else found.fused)
    return run, split, None if split is not None else found


def _restore_blocks(planned: Iterable[PlannedBlock]) -> None:
    for block in planned:
        block.disconnect()


def _check_islands(world: World) -> None:
    """Raise ConfigError if there are islands, because each has only its own part of the batch."""
    if world.mesh.islands > 1 or world.collectives.has_changing_ranks:
        raise ConfigError(
            f"--islands {world.settings.islands} cannot be combined with balance, z_loss and "
            "bias_rate of sw.MoE: they need the counts of the whole batch, and each island has "
            "only its own. Set them to 0, or remove the flag."
        )


def _find_experts(
    world: World,
    models: Sequence[nn.Module],
    layers: Sequence[tuple[str, MoE]],
    planned: list[PlannedBlock],
    *,
    is_exact: bool,
) -> ExpertParallelModels:
    """Find the modules to split in addition to `layers`. Collective.

    Raises ModelError on all ranks if a planned block cannot be split, or if `--expert` finds
    nothing to split.
    """
    split = ExpertParallelModels(world.expert, world.expert_copies)
    for block in planned:
        block.keep_whole()
    fused = find_fused(models)
    # Rank 0 decides, so that a trial whose result depends on the machine cannot divide the ranks.
    mine: tuple[dict[str, str | None], dict[str, str | None]] = {}, {}
    if world.rank == 0:
        mine = unsplit_reasons(fused), {block.name: block.why_not() for block in planned}
    reasons, refused = world.collectives.gather_plain(mine)[0]
    split.planned = planned
    for name, why in refused.items():
        if why is not None:
            raise ModelError(
                f"--expert {world.expert_size} cannot split {name}, which expert_plan names: "
                f"{why}. Build it with sw.MoE(router, experts, top_k=2), or leave it out."
            )
    split.fused = [(n, FusedExperts(m)) for n, m in fused.items() if reasons.get(n) is None]
    split.reasons_unsplit = {name: why for name, why in reasons.items() if why is not None}
    for _, layer in layers:
        # A shared expert processes all tokens on every rank, so tensor parallelism may split it.
        split.modules |= {layer, *layer.router.modules(), *layer.experts.modules()}
    split.modules |= {m for block in planned for m in block.module.modules()}
    split.modules |= {fused.module for _, fused in split.fused}
    if world.expert_size > 1 and not layers and not split.fused and not planned:
        left = "".join(f" Not split: {n}: {why}." for n, why in split.reasons_unsplit.items())
        raise ModelError(
            f"--expert {world.expert_size} found no mixture-of-experts layer to split in "
            f"{type(models[0]).__name__}.{left} Build its layers with sw.MoE(router, experts, "
            "top_k=2), name them in sw.Engine(..., expert_plan=...), or start without --expert."
        )
    for model in models:
        config = getattr(model, "config", None)
        # In exact mode the loss is that of one micro-shard on any number of workers.
        if getattr(config, "output_router_logits", False) and not is_exact:
            raise ModelError(
                f"--expert {world.expert_size}: {type(model).__name__} computes its router loss "
                "from one worker's tokens (config.output_router_logits=True), so training would "
                "depend on the number of workers. Set it to False, or build the layers with "
                "sw.MoE(..., balance=0.01)."
            )
    return split


def _check(
    world: World,
    settings: Settings,
    layers: Sequence[tuple[str, MoE]],
    models: Sequence[nn.Module],
) -> None:
    """Raise ConfigError if `settings` cannot be combined with `layers`."""
    size = world.expert_size
    is_split_in_two = settings.schedule == "zero-bubble" and world.pipeline_size > 1
    if is_split_in_two and (size > 1 or any(layer.has_losses for _, layer in layers)):
        raise ConfigError(
            "--schedule zero-bubble cannot be combined with --expert, or with balance or z_loss "
            "of sw.MoE: it splits backward in two, and both parts would run the layers. Write "
            "--schedule 1f1b or --schedule interleaved."
        )
    if size == 1:
        return
    if settings.shard_within == "host":
        raise ConfigError(
            f"--expert {size} cannot be combined with --shard-within host yet. Remove one of the "
            "two."
        )
    inside = {m for _, layer in layers for m in layer.modules() if m is not layer}
    for model in models:
        for name, unit in units.find_units(model, settings.units):
            if unit in inside:
                raise ConfigError(
                    f"units: {name} is inside a mixture-of-experts layer. With --expert {size}, "
                    "the layer is gathered as a whole: name it, or the block around it."
                )


def _check_exact(
    world: World, settings: Settings, models: Sequence[nn.Module], found: ExpertParallelModels
) -> None:
    """Raise ConfigError if `--exact` cannot be combined with `--expert` for these models."""
    exact = settings.exact
    if not world.expert_copies.knows_tree:
        raise ConfigError(
            f"--exact {exact} with --expert {world.expert_size} sums the gradients of experts in a "
            "binary tree over hosts: start a power of two of ranks on each host, numbered host by "
            "host, or write --transport gloo."
        )
    dtypes = {p.dtype for model in models for p in model.parameters()}
    for dtype in (*dtypes, PRESETS[settings.precision].cast):
        if dtype not in NARROW:
            continue
        raise ConfigError(
            f"--exact {exact} cannot be combined with --expert {world.expert_size} and parameters "
            f"in {dtype}: a worker would round the sum of several micro-shards' gradients to 16 "
            "bits. Keep parameters in fp32 (--precision bf16-mixed), or remove one of the two."
        )
    for name, module in named_modules(models):
        if module in found.modules and isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"--exact {exact} cannot be combined with --expert {world.expert_size} for {name} "
                f"({type(module).__name__}): its products use a list of its weights, and not the "
                "weights of a micro-shard, so the order of sums would depend on the number of "
                "workers. Use other layers in experts, or remove one of the two."
            )
    for name, fused in found.fused:
        for key, parameter in fused.module.named_parameters():
            numel = parameter.shape[1:].numel()
            size = numel * parameter.itemsize
            if size % CACHE_LINE:
                raise ConfigError(
                    f"--exact {exact} cannot be combined with --expert {world.expert_size} for "
                    f"{name}: an expert of {key} has {size} bytes, which is no multiple of "
                    f"{CACHE_LINE}. Its alignment in memory, and so its rounding, would depend on "
                    "which experts a worker holds. Choose other sizes, or remove one of the two."
                )
            if settings.quantises_state and numel % quantised_storage.BLOCK:
                raise ConfigError(
                    f"--exact {exact} cannot be combined with --expert {world.expert_size} and "
                    f"--optimizer-state {settings.optimizer_state} for {name}: an expert of {key} "
                    f"has {numel} elements, which is no multiple of {quantised_storage.BLOCK}. A "
                    "block with a common scale would cross two experts, and which ones would "
                    "depend on the experts that a worker holds. Choose other sizes, or remove one "
                    "of the three."
                )


def split(spec: EngineSpec) -> None:
    """Connect the layers with `spec.routing`, and free other ranks' experts."""
    layers = _layers_of(spec)
    for _, layer in layers:
        layer.join_run(spec.routing)
    if (connected := spec.connected_experts) is not None:
        assert spec.routing is not None
        for block in connected.planned:
            block.connect()
        for _, fused in connected.fused:
            fused.connect(spec.routing)
    if spec.experts is not None:
        try:
            spec.experts.cut([*layers, *spec.experts.fused], spec.models, spec.optimizers)
        except ModelError:  # on all ranks, before anything has been cut
            _disconnect(spec)
            raise


def restore(spec: EngineSpec) -> None:
    """Restore all experts on every rank, and disconnect the layers. Collective."""
    if spec.experts is not None:
        spec.experts.undo(spec.optimizers, spec.is_here)
    _disconnect(spec)


def _layers_of(spec: EngineSpec) -> list[tuple[str, MoE]]:
    connected = spec.connected_experts
    planned = () if connected is None else connected.planned
    return [*find_layers(spec.models), *((block.name, block.layer) for block in planned)]


def _disconnect(spec: EngineSpec) -> None:
    for _, layer in _layers_of(spec):
        layer.join_run(None)
    if (connected := spec.connected_experts) is not None:
        _restore_blocks(connected.planned)
        for _, fused in connected.fused:
            fused.disconnect()


def begin_backward(
    run: RoutingRun,
    weighting: GradientWeighting,
    loss: Tensor | None,
    weight: float | Tensor,
    share: float,
    *,
    is_sole: bool,
) -> float | Tensor:
    """Prepare the mixture-of-experts layers for a backward pass of `loss`.

    With `--pipeline`, the pass is that of one stage, and `loss` is None except on the last one.

    Collective if the layers have router losses. Returns the weight for the gradients: `weight`, or
    1.0 if `weight` is 0 but the router losses still need gradients.
    """
    has_tokens, run.has_tokens = run.has_tokens, False
    if run.in_stages:
        # Between a micro-batch's two passes, a stage runs others. Only stand-ins have no share.
        has_tokens = share > 0
    run.summed.clear()
    run.drops = weight == 0
    if run.is_split and loss is not None and loss.grad_fn is None:
        raise UsageError(
            "This loss has no graph, but the backward pass of experts needs every worker "
            "(--expert): compute the loss with gradients on, also if its weight is 0."
        )
    if not run.has_losses:
        return weight
    # One number per rank: the weight that the loss of the whole batch has in this step.
    device = run.everyone.small_device
    row = (
        weight.to(device, torch.float64)
        if isinstance(weight, Tensor)
        else to_device(torch.tensor(weight, dtype=torch.float64), device)
    ).reshape(1)
    weights = run.everyone.read(run.everyone.gather_rows(row)).reshape(-1)
    # Losses that are sums count once on each rank, but the router losses count once in total.
    # The ranks of a replica have the same loss.
    total = run.divisor or float(weights[:: run.lanes.size].sum())
    run.loss_seed = weighting.seed_of(total, share, is_sole=is_sole)
    mine = float(weights[run.everyone.rank])
    # Gradients of the router losses of later layers arrive from above, and must not be dropped.
    run.drops = not (mine or has_tokens)
    if mine or not has_tokens:
        return mine
    # Tokens count toward the router losses even if none of them has a label.
    if loss is not None and not bool(torch.isfinite(loss.detach()).all()):
        raise UsageError(
            "A loss over no items is NaN or infinite, but its tokens count in the router losses of "
            "sw.MoE. Divide by at least one: loss.sum() / max(n, 1), or pass a mask to sw.MoE."
        )
    return 1.0
