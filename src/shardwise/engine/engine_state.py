"""EngineState holds what the parts of one engine share: what it is made of, and where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.amp import GradScaler

from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.config import Settings
from shardwise.engine import exact_mode, pipeline_parallel, tensor_parallel, usage_checks
from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.exchange import squared_norm
from shardwise.engine.gradient_weighting import GradientWeighting
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.engine.step_statistics import Aggregation
from shardwise.engine.user_objects import UserObjects, living
from shardwise.errors import ModelError, UsageError
from shardwise.model import precision
from shardwise.model.buffers import Buffers
from shardwise.model.loss_scale import LossScale
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_hooks import HookedCheckpoints, Returns
from shardwise.states.step_totals import StepTotals
from shardwise.world.world import World


@dataclass(eq=False)
class EngineState:
    """The engine numbered `number` in this process, as its parts see it.

    The first fields never change; those from `steps` on are where training is.
    """

    world: World
    number: int
    spec: EngineSpec
    objects: UserObjects
    scale: LossScale
    aggregation: Aggregation
    weighting: GradientWeighting
    accumulation: LossAccumulation
    """This rank's backwards since the last step."""
    extra_sets: ExtraSets
    """What checkpoints hold besides model, optimizers and progress."""
    steps: int = 0
    """How many steps were made."""
    totals: StepTotals | None = None
    """What all ranks know of this step, once its gradients are reduced."""
    in_uneven: bool = False
    """Whether ranks may run different numbers of forwards now."""
    asked_to_end: bool = False
    """Whether the exchange of a step of this engine has told all ranks of a signal to end."""

    @property
    def in_ema(self) -> bool:
        """Whether the parameters are averages now, or the anchor."""
        return self.objects.in_ema

    @in_ema.setter
    def in_ema(self, value: bool) -> None:
        self.objects.in_ema = value

    @property
    def buffers(self) -> Buffers:
        """The buffers of the models, which forwards may change."""
        return self.objects.buffers

    @property
    def replicas(self) -> int:
        """How many replicas of the model make a step together."""
        return self.spec.replicas

    @property
    def states(self) -> States:
        """Parameters, gradients and optimizer state as they are laid out now."""
        return self.objects.states

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """Which backward of which step of which engine and replica comes next: what random
        numbers are drawn for."""
        return self.number, self.steps, self.world.data_rank, self.accumulation.backwards

    @property
    def is_between_steps(self) -> bool:
        """Whether the engine can be saved now."""
        return self.accumulation.backwards == 0 and not self.in_ema

    def continue_at(self, steps: int) -> None:
        """Count on from `steps`, which a checkpoint has made."""
        if steps:
            usage_checks.mark_schedulers(self.spec.optimizers)
        self.steps = steps

    def refuse_in_step(self, call: str) -> None:
        """Raise UsageError unless `call` comes between two steps."""
        if self.accumulation.backwards:
            raise UsageError(
                f"{call} between engine.backward and engine.step: call it after the step."
            )
        if self.in_ema:
            raise UsageError(f"{call} inside engine.ema() or anchor(): leave the block first.")

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Context manager: the parameters hold the anchor inside it, if groups of ranks have made
        updates of their own. Collective over each group."""
        hooks = self.states.hooks
        if hooks is None or not hooks.have_own_weights:
            yield
            return
        with torch.no_grad():
            context = hooks.common_weights()
            context.__enter__()
        self.in_ema = True
        self.parameters_changed()
        try:
            yield
        finally:
            self.in_ema = False
            context.__exit__(None, None, None)
            self.parameters_changed()

    def squared_norm(self) -> float:
        """Return the squared norm of the gradient sums as they are now, over all layers. Collective
        over the ranks that make this step."""
        spec = self.spec
        squared = squared_norm(
            self.aggregation, self.states.gradients, spec.stage_group, spec.shard_group.copies
        )
        if spec.pipeline is None:
            return squared
        group = spec.pipeline.group
        row = torch.tensor([squared], dtype=torch.float64, device=group.small_device)
        return float(group.read(group.gather_rows(row)).sum())

    def returns_of(self, checkpoints: HookedCheckpoints) -> Returns | None:
        """Return what brings groups of ranks back by `checkpoints`, None if none can end alone."""
        hooks = self.spec.hooks
        return None if hooks is None else hooks.returns(self, checkpoints)

    def parameters_changed(self) -> None:
        """Parameters have other values now: with `--pipeline` other stages may have copies."""
        if self.spec.pipeline is not None:
            self.spec.pipeline.tied_weights.invalidate()


def spec_of(
    world: World,
    settings: Settings,
    models: nn.Module | Sequence[nn.Module],
    optimizers: optim.Optimizer | Sequence[optim.Optimizer],
    tensor_plan: TensorPlan | None,
) -> EngineSpec:
    """What an engine is made from. Raises ModelError for what is no model or no optimizer, and
    ConfigError for settings that cannot be had together."""
    shards = exact_mode.shards_of(settings, world.collectives)
    several = _several(models, nn.Module)
    given = _several(optimizers, optim.Optimizer)
    for optimizer in given:
        usage_checks.check_optimizer(optimizer)
    return EngineSpec(
        several,
        given,
        settings.placement,
        settings,
        world.collectives,
        world.data,
        world.device,
        world.gather_order,
        shards,
        tensor_parallel.begin(world, settings, tensor_plan),
        pipeline_parallel.begin(world, settings, several),
        world.stage,
        world.step_group,
        world.peers,
    )


def build_state(
    world: World,
    number: int,
    spec: EngineSpec,
    scaler: GradScaler | None,
    tensor_plan: TensorPlan | None,
) -> EngineState:
    """Take over the user's objects, and lay out their states. Collective."""
    _refuse_second_engine(spec)
    accumulation = LossAccumulation()
    world.unstepped.watch(accumulation)
    scale = LossScale(scaler, active=precision.PRESETS[spec.settings.precision].scaled)
    aggregation = (
        Aggregation(world.data_rank)
        if spec.micro_shards is None
        else exact_mode.ExactAggregation(spec.micro_shards)
    )
    # Seeds are the same on all ranks whose gradients are summed.
    estimated_by = spec.data_group if spec.staleness is None else spec.world_group
    crosses = spec.settings.sync_batch_norm and spec.data_group.size > 1
    alone = world.size == 1 and spec.micro_shards is None
    weighting = GradientWeighting(scale, estimated_by, aggregation, crosses=crosses, alone=alone)
    objects = UserObjects(world, spec, accumulation, weighting, tensor_plan)
    return EngineState(
        world,
        number,
        spec,
        objects,
        scale,
        aggregation,
        weighting,
        accumulation,
        spec.extra_sets,
    )


def _refuse_second_engine(spec: EngineSpec) -> None:
    """Raise UsageError for a parameter that another engine trains: they would undo each other's
    work."""
    taken = {t.parameter for other in living for t in other.states.parameters.named}
    for named in spec.located():
        if named.parameter in taken:
            raise UsageError(
                f"{named.name} is already trained by another engine. Give each parameter to "
                "one engine, or end that one first: engine.close()."
            )


def _several(given: Any, kind: type[Any]) -> tuple[Any, ...]:
    one = isinstance(given, kind) or not isinstance(given, Iterable)
    several = (given,) if one else tuple(given)
    wrong = [item for item in several if not isinstance(item, kind)]
    if wrong or not several:
        shown = type(wrong[0]).__name__ if wrong else "nothing"
        raise ModelError(
            f"sw.Engine(model, optimizer) takes {_KINDS[kind]}, or several, not {shown}."
        )
    return several


_KINDS = {nn.Module: "a torch.nn.Module first", optim.Optimizer: "a torch optimizer second"}
