"""Connects mixture-of-experts layers with the engine, and splits experts over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.config import Settings
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.gradient_weighting import GradientWeighting
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model import units
from shardwise.parallel.expert.moe import MoE
from shardwise.parallel.expert.routing_run import RoutingRun
from shardwise.parallel.expert.split_experts import ExpertParallelModels, find_layers
from shardwise.world.world import World


def begin(
    world: World, settings: Settings, models: Sequence[nn.Module]
) -> tuple[RoutingRun | None, ExpertParallelModels | None]:
    """Return the run of the models' layers, and an empty expert-parallel state.

    Both are None if there are no such layers; the second one also if every rank holds all experts.
    Collective if there are layers.

    Raises ModelError if there are no experts to split, and ConfigError if settings are incompatible
    with mixture-of-experts layers.
    """
    layers = find_layers(models)
    size = world.expert_size
    if not layers:
        if size > 1:
            raise ModelError(
                f"--expert {size} found no mixture-of-experts layer in "
                f"{type(models[0]).__name__}. Build its layers with sw.MoE(router, experts, "
                "top_k=2), or start without --expert."
            )
        return None, None
    _check(settings, layers, models, size)
    run = RoutingRun(world.expert, world.routing_channel, world.current_batch)
    run.layers = [layer for _, layer in layers]
    return run, None if size == 1 else ExpertParallelModels(world.expert, world.expert_copies)


def _check(
    settings: Settings, layers: Sequence[tuple[str, MoE]], models: Sequence[nn.Module], size: int
) -> None:
    """Raise ConfigError if settings cannot be combined with the layers."""
    for name, layer in layers:
        statistics = [
            word
            for word, value in {
                "balance": layer.balance, "z_loss": layer.z_loss, "bias_rate": layer.bias_rate
            }.items()
            if value
        ]
        for flag, value in {"exact": settings.exact, "pipeline": settings.pipeline}.items():
            if statistics and value is not None and value > (flag == "pipeline"):
                raise ConfigError(
                    f"--{flag} {value} cannot be combined with {' and '.join(statistics)} of "
                    f"{name or 'sw.MoE'}: they need the counts of the whole batch, which --{flag} "
                    "cuts. Set them to 0, or remove the flag."
                )
    if size == 1:
        return
    for flag, given in {
        "--compile": settings.compile,
        "--shard-within host": settings.shard_within == "host",
    }.items():
        if given:
            raise ConfigError(
                f"--expert {size} cannot be combined with {flag} yet. Remove one of the two."
            )
    inside = {m for _, layer in layers for m in layer.modules() if m is not layer}
    for model in models:
        for name, unit in units.find_units(model, settings.units):
            if unit in inside:
                raise ConfigError(
                    f"units: {name} is inside a mixture-of-experts layer. With --expert {size}, "
                    "the layer is gathered as a whole: name it, or the block around it."
                )


def split(spec: EngineSpec) -> None:
    """Connect the layers with the run, and free the experts of other ranks."""
    layers = find_layers(spec.models)
    for _, layer in layers:
        layer._run = spec.routing
    if spec.experts is not None:
        spec.experts.cut(layers, spec.models, spec.optimizers)


def restore(spec: EngineSpec) -> None:
    """Give every rank all experts again, and disconnect the layers. Collective."""
    if spec.experts is not None:
        spec.experts.undo(spec.optimizers)
    if spec.routing is not None:
        for layer in spec.routing.layers:
            layer._run = None


def begin_backward(
    run: RoutingRun,
    weighting: GradientWeighting,
    loss: Tensor,
    weight: float | Tensor,
    share: float,
    *,
    is_sole: bool,
) -> float | Tensor:
    """Prepare the layers for a backward pass of `loss`.

    Collective if the layers have router losses. Returns `weight`, or 1.0 if gradients must be kept
    although the weight is 0.
    """
    has_tokens, run.has_tokens = run.has_tokens, False
    run.drops = weight == 0
    if not run.has_losses:
        return weight
    # One number per rank: the weight that the loss of the whole batch has in this step.
    row = torch.as_tensor(weight, dtype=torch.float64).to(run.everyone.small_device).reshape(1)
    weights = run.everyone.read(run.everyone.gather_rows(row)).reshape(-1)
    # Losses that are sums count once on each rank, but the router losses count once in total.
    total = run.divisor or float(weights.sum())
    run.loss_seed = weighting.seed_of(total, share, is_sole=is_sole)
    mine = float(weights[run.everyone.rank])
    run.drops = mine == 0
    if mine or not has_tokens:
        return mine
    # Tokens count in the router losses also if none of them has a label.
    if not bool(torch.isfinite(loss.detach()).all()):
        raise UsageError(
            "A loss over no items is NaN or infinite, but its tokens count in the router losses of "
            "sw.MoE. Divide by at least one: loss.sum() / max(n, 1), or pass a mask to sw.MoE."
        )
    return 1.0
