"""Defines the state that an engine's parts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.amp import GradScaler

from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.config import Settings
from shardwise.engine import (
    context_parallel,
    exact_mode,
    expert_parallel,
    pipeline_parallel,
    tensor_parallel,
    usage_checks,
)
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
from shardwise.parallel.context.planned_attention import ContextPlan
from shardwise.parallel.expert.planned_blocks import ExpertPlan
from shardwise.parallel.tensor import chunked_loss
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_hooks import HookedCheckpoints, Returns
from shardwise.states.step_totals import StepTotals
from shardwise.world.world import World


@dataclass(eq=False)
class EngineState:
    """The state that the parts of one engine share.

    `number` is the engine's index in this process. `steps` and the fields after it change during
    training; the fields before it do not.
    """

    world: World
    number: int
    spec: EngineSpec
    objects: UserObjects
    scale: LossScale
    aggregation: Aggregation
    weighting: GradientWeighting
    accumulation: LossAccumulation
    """This rank's backward passes since the last step."""
    extra_sets: ExtraSets
    """Checkpoint tensors other than model, optimizers and progress."""
    steps: int = 0
    """Number of completed steps."""
    totals: StepTotals | None = None
    """This step's totals across all ranks, once its gradients are reduced."""
    in_uneven: bool = False
    """True while ranks may run different numbers of forward passes."""
    asked_to_end: bool = False
    """True once an exchange of this engine has told all ranks to stop after a signal."""

    @property
    def in_ema(self) -> bool:
        """True while the parameters hold their averaged (EMA) or anchor values."""
        return self.objects.in_ema

    @in_ema.setter
    def in_ema(self, value: bool) -> None:
        self.objects.in_ema = value

    @property
    def buffers(self) -> Buffers:
        """The models' buffers, which forward passes may change."""
        return self.objects.buffers

    @property
    def replicas(self) -> int:
        """Number of model replicas that step together."""
        return self.spec.replicas

    @property
    def states(self) -> States:
        """Parameters, gradients and optimizer state in their current layout."""
        return self.objects.states

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """Indices of engine, step, replica and backward pass. They seed the next backward pass."""
        return (
            self.number,
            self.steps,
            self.world.mesh.data_of(self.world.rank),
            self.accumulation.backwards,
        )

    @property
    def is_between_steps(self) -> bool:
        """True if the engine can be saved now."""
        return self.accumulation.backwards == 0 and not self.in_ema

    def continue_at(self, steps: int) -> None:
        """Set the number of completed steps after loading a checkpoint."""
        # Otherwise schedulers created after a resume warn that the optimizer has not stepped.
        if steps:
            usage_checks.mark_schedulers(self.spec.optimizers)
        self.steps = steps

    def refuse_in_step(self, call: str) -> None:
        """Raise UsageError for `call` during a step, or inside an EMA or anchor block."""
        if self.accumulation.backwards:
            raise UsageError(
                f"{call} between engine.backward and engine.step: call it after the step."
            )
        if self.in_ema:
            raise UsageError(f"{call} inside engine.ema() or anchor(): leave the block first.")

    def refuse_on_waiting_spare(self, call: str) -> None:
        """Raise UsageError for `call`, which writes files, on a spare that has not joined yet."""
        if self.world.survival is not None and self.world.survival.group.is_waiting:
            raise UsageError(
                f"{call} on a spare before its first training batch (--spares, shardwise "
                "scale-up): it has not joined the other workers yet, so it would write over their "
                f"files. Call {call} in the training loop."
            )

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Context manager that swaps in the anchor if islands have different weights.

        Collective.
        """
        hooks = self.states.hooks
        if hooks is None or not hooks.have_own_weights:
            yield
            return
        with self.other_weights(hooks.common_weights()):
            yield

    @contextmanager
    def other_weights(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Context manager that marks the weights as swapped inside `context`, which swaps them."""
        with torch.no_grad():
            # Enter the context by hand, so that autograd is off only during the swap, not inside
            # the block.
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
        """Return the squared norm of the gradient sums of all layers. Collective."""
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
        """Return the object that lets islands rejoin from `checkpoints`. None without islands."""
        hooks = self.spec.hooks
        return None if hooks is None else hooks.returns(self, checkpoints)

    def parameters_changed(self) -> None:
        """Invalidate the copies of tied weights on other pipeline stages.

        Call this after parameters have changed.
        """
        if self.spec.pipeline is not None:
            self.spec.pipeline.tied_weights.invalidate()


def spec_of(
    world: World,
    settings: Settings,
    models: nn.Module | Sequence[nn.Module],
    optimizers: optim.Optimizer | Sequence[optim.Optimizer],
    tensor_plan: TensorPlan | None,
    expert_plan: ExpertPlan | None,
    context_plan: ContextPlan | None,
) -> EngineSpec:
    """Create the spec of an engine from the arguments of `Engine`.

    Raises ModelError if an argument is not a model or an optimizer, and ConfigError if settings
    cannot be combined.
    """
    exact_mode.check(settings, world.collectives)
    model_tuple = _as_tuple(models, nn.Module)
    optimizer_tuple = _as_tuple(optimizers, optim.Optimizer)
    for optimizer in optimizer_tuple:
        usage_checks.check_optimizer(optimizer)
    tensor = tensor_parallel.begin(world, settings, tensor_plan)
    return EngineSpec(
        model_tuple,
        optimizer_tuple,
        settings.placement,
        settings,
        world.collectives,
        world.data,
        world.device,
        world.gather_order,
        tensor,
        pipeline_parallel.begin(world, settings, model_tuple),
        world.stage,
        world.step_group,
        world.peers,
        *expert_parallel.begin(world, settings, model_tuple, expert_plan, tensor),
        context_parallel.begin(world, settings, model_tuple, context_plan),
        tuple(chunked_loss.find(model_tuple)) if settings.chunked_loss else (),
    )


def build_state(
    world: World,
    number: int,
    spec: EngineSpec,
    scaler: GradScaler | None,
    tensor_plan: TensorPlan | None,
) -> EngineState:
    """Prepare the user's objects, and build the engine's states. Collective."""
    _refuse_second_engine(spec)
    accumulation = LossAccumulation()
    # Pass only the accumulation, so that the engine itself can be freed.
    world.unstepped.watch(accumulation)
    scale = LossScale(scaler, active=precision.PRESETS[spec.settings.precision].scaled)
    aggregation = (
        Aggregation(world.mesh.data_of(world.rank))
        if spec.micro_shards is None
        else exact_mode.ExactAggregation(spec.micro_shards)
    )
    # The unit of loss weights must be the same on all ranks whose gradients are summed.
    estimated_by = spec.data_group if spec.staleness is None else spec.world_group
    # SyncBatchNorm sends gradients of one rank's loss to other ranks inside the graph.
    crosses = spec.settings.sync_batch_norm and spec.data_group.size > 1
    # So do experts that compute other ranks' tokens. Router losses also need seeds of full weight.
    # Attention over parts of sequences sends gradients in the same way.
    crosses = (
        crosses or spec.context is not None or (spec.routing is not None and spec.routing.crosses)
    )
    # Exact mode fixes the order of sums even on a single worker.
    alone = world.is_alone and spec.micro_shards is None
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
    """Raise UsageError if another engine already trains one of the parameters."""
    trained = {t.parameter for other in living for t in other.states.parameters.named}
    for named in spec.located():
        if named.parameter in trained:
            raise UsageError(
                f"{named.name} is already trained by another engine. Pass each parameter to one "
                "engine, or close the other one first: engine.close()."
            )


def _as_tuple(argument: Any, kind: type[Any]) -> tuple[Any, ...]:
    """Return an object, or a sequence of objects, as a tuple. Raises ModelError for other types."""
    is_one = isinstance(argument, kind) or not isinstance(argument, Iterable)
    items = (argument,) if is_one else tuple(argument)
    wrong = [item for item in items if not isinstance(item, kind)]
    if wrong or not items:
        shown = type(wrong[0]).__name__ if wrong else "nothing"
        raise ModelError(
            f"sw.Engine(model, optimizer) takes {_KINDS[kind]}, or several, not {shown}."
        )
    return items


_KINDS = {nn.Module: "a torch.nn.Module first", optim.Optimizer: "a torch optimizer second"}
