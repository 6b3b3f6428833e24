"""ObservedEngine: replaces sw.Engine in an observed script, and frees the parameters' storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler

from shardwise import config
from shardwise.engine import usage_checks
from shardwise.engine.engine import Engine
from shardwise.engine.engine_state import spec_of
from shardwise.engine.gradient_weighting import divisor_of
from shardwise.errors import ConfigError
from shardwise.model import precision
from shardwise.model.activations import Activations
from shardwise.model.module_hooks import attach
from shardwise.parallel.context.planned_attention import ContextPlan
from shardwise.parallel.expert.moe import MoE
from shardwise.parallel.expert.planned_blocks import ExpertPlan
from shardwise.parallel.pipeline import runner
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_totals import StepStats
from shardwise.tools.plan.engine_parts import (
    AbsentParts,
    ObservedParameter,
    note_experts,
    note_layers,
    note_spec,
    replace_in,
    route_shares,
    split_first_part,
)
from shardwise.tools.plan.observation import Observation, finish
from shardwise.tools.plan.record import RoutedTokens, SequenceExchange, UnitUse
from shardwise.world.world import World
from shardwise.world.world import current as current_world


class ObservedEngine(Engine):
    """An engine without states, which records the first step and then exits the script."""

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: optim.Optimizer | Sequence[optim.Optimizer],
        *,
        scaler: GradScaler | None = None,
        tensor_plan: TensorPlan | None = None,
        expert_plan: ExpertPlan | None = None,
        context_plan: ContextPlan | None = None,
        **settings: Any,
    ) -> None:
        # A GradScaler only changes values, and an observed step has no values.
        del scaler
        observation = Observation.current
        assert observation is not None
        self._observation = observation
        self.world = world = current_world()
        config.refuse_elsewhere(settings, "engine")
        self.settings = world.settle_engine(settings)
        config.check_contradictions(replace(self.settings, tensor=observation.tensor))
        self.placement = self.settings.placement
        number, world.engines = world.engines, world.engines + 1
        world.expect_no_engine()
        if self.settings.context > 1:
            raise ConfigError(
                f"--context {self.settings.context} is set by the script or its configuration, but "
                "shardwise plan chooses it. Leave it out, or write shardwise plan --context C."
            )
        if observation.context > 1:
            world.context = AbsentParts(observation.context, self._note_exchange)
            world.settings = replace(world.settings, context_method=observation.method)
        spec = spec_of(
            world, self.settings, models, optimizers, tensor_plan, expert_plan, context_plan
        )
        if observation.tensor > 1:
            spec = split_first_part(
                spec, tensor_plan or {}, observation.tensor, spreads=observation.spread
            )
        if spec.context is not None:
            spec.context.skip_trial()
        self._spec = spec
        self.backwards = 0
        self.stepped = False
        self._depth = 0
        self._stack: list[tuple[int, int, int]] = []
        """Units whose forward pass is running: (unit, enclosing unit, first operation)."""
        noted = note_spec(spec, number, len(observation.units), len(observation.groups))
        observation.units += noted.units
        observation.groups += noted.groups
        observation.parameters += noted.parameters
        layers, inside = note_layers(spec, noted.parameters)
        observation.layers += layers
        experts = note_experts(spec, noted.parameters)
        self._take_memory(noted.parameters)
        self._enter_settings(world)
        self._hook_modules(noted.modules, inside)
        if spec.context is not None:
            spec.context.install()
        for loss in spec.chunked_losses:
            loss.install()
        if observation.spread:
            route_shares(spec, [module for module, *_ in experts], observation.tensor)
        for module, number, divisible in experts:
            hook = self._routing(number, divisible)
            attach(module.register_forward_pre_hook, hook, with_kwargs=True)
        observation.engines.append(self)

    # -- construction -----------------------------------------------------------------------

    @property
    def models(self) -> Sequence[nn.Module]:
        return self._spec.models

    def _take_memory(self, parameters: Sequence[ObservedParameter]) -> None:
        """Replace each parameter with a fake one, in all models and optimizers."""
        cast = precision.PRESETS[self.settings.precision].cast
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for each in parameters:
            old, named = each.named.parameter, each.named
            if cast is not None and old.is_floating_point():
                named.dtype = cast if precision.is_cast(named.places, cast) else old.dtype
            with self._observation.fake:
                like = torch.empty_strided(named.shape, named.strides, dtype=named.dtype)
            new = nn.Parameter(like, requires_grad=old.requires_grad)
            # Parameters are counted as states by layout.py, so exclude them from the activations.
            self._observation.recorder.ignore(new)
            replaced[old] = new
            named.parameter = new
            if new.requires_grad:
                new.register_post_accumulate_grad_hook(self._arrival(each))  # type: ignore[no-untyped-call]
        # Replace tied weights with the same new parameter everywhere.
        for module in (m for model in self._spec.models for m in model.modules()):
            replace_in(module, replaced)
        for optimizer in self._spec.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [replaced.get(p, p) for p in group["params"]]
            # The state of the old parameters would keep their memory alive.
            optimizer.state.clear()

    def _arrival(self, each: ObservedParameter) -> Callable[[Tensor], None]:
        """Return a hook that records when the gradient is complete, and frees the gradient."""
        # The real engine moves the gradient to a bucket and frees `param.grad`, so free it here.
        recorder = self._observation.recorder

        def arrived(parameter: Tensor) -> None:
            each.arrived = len(recorder.operations) - 1
            parameter.grad = None

        return arrived

    def _enter_settings(self, world: World) -> None:
        """Apply the `precision` and `activations` settings to the models' forward passes."""
        spec, preset = self._spec, precision.PRESETS[self.settings.precision]
        if preset.cast is not None:
            precision.cast_models(spec.models, preset.cast)
        for model in spec.models:
            for buffer in model.buffers():
                self._observation.recorder.ignore(buffer)
                self._observation.buffer_bytes += buffer.numel() * buffer.element_size()
            if preset.cast is not None or preset.autocast is not None:
                precision.ForwardPrecision(preset, "cpu").attach(model)
        # In the record, recomputation appears as forward passes inside the backward pass.
        Activations(spec.models, self.settings, world.device, rank=world.rank)

    def _hook_modules(
        self, units: Mapping[nn.Module, int], layers: Mapping[nn.Module, int]
    ) -> None:
        for model in self._spec.models:
            for module in model.modules():
                number, layer = units.get(module, -1), layers.get(module, -1)
                attach(
                    module.register_forward_pre_hook, self._entering(number, layer), prepend=True
                )
                # always_call, because torch's checkpointing stops a recomputation early by raising
                # an exception in a forward pass, and the unit must still be popped from the stack.
                attach(module.register_forward_hook, self._leaving(number), always_call=True)

    def _entering(self, number: int, layer: int) -> Callable[..., None]:
        """Return the forward pre-hook of a module.

        `number` is the module's unit index (-1 if it is not a unit), and `layer` is the module's
        layer index (-1 if it is not a layer).
        """
        recorder = self._observation.recorder

        def enter(module: nn.Module, args: Any) -> None:
            del module, args
            # Only the outermost forward pass of training starts a recording. A forward pass inside
            # a backward pass is a recomputation, one without gradients is an evaluation.
            if not self._depth and torch.is_grad_enabled() and not recorder.backward:
                # The forward pass of a second batch adds nothing new to the record.
                if self.backwards and self.world.current_batch.batch is not self._observation.batch:
                    self._end_if_alone()
                recorder.active = True
            if layer >= 0 and recorder.active and not recorder.backward:
                observation = self._observation
                if layer < recorder.layer:
                    observation.disordered = observation.layers[recorder.layer].name
                recorder.layer = layer  # for the operators that follow
            if number >= 0:
                self._stack.append((number, recorder.unit, len(recorder.operations)))
                recorder.unit = number
            self._depth += 1

        return enter

    def _routing(self, experts: int, divisible: bool) -> Callable[..., None]:
        """Return a hook that records how many bytes of tokens a layer sends to its experts."""
        recorder = self._observation.recorder

        def route(module: nn.Module, args: Any, kwargs: Any) -> None:
            values = [*args, *kwargs.values()]
            if not recorder.active or recorder.backward:
                return
            # Transformers' experts also receive the chosen experts, (T, k).
            top_k = module.top_k if isinstance(module, MoE) else values[1].shape[-1]
            # The ranks of a replica have the same tokens, and each sends a share of them.
            senders = self._observation.tensor if self._observation.spread else 1
            tokens = RoutedTokens(
                -(-values[0].numel() * values[0].element_size() * int(top_k) // senders),
                recorder.unit,
                experts,
                divisible,
            )
            self._observation.routed.append(tokens)

        return route

    def _note_exchange(self, nbytes: int) -> None:
        """Record an exchange between context-parallel ranks."""
        recorder = self._observation.recorder
        if recorder.active:
            phase = "backward" if recorder.backward else "forward"
            unit = recorder.current_unit()
            self._observation.exchanged.append(SequenceExchange(nbytes, unit, phase))

    def _leaving(self, number: int) -> Callable[..., None]:
        recorder = self._observation.recorder

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del module, args, output
            self._depth -= 1
            if number >= 0:
                unit, before, first = self._stack.pop()
                recorder.unit = before
                if recorder.active:
                    phase = "backward" if recorder.backward else "forward"
                    self._observation.uses.append(
                        UnitUse(unit, phase, first, len(recorder.operations))
                    )

        return leave

    # -- a step -----------------------------------------------------------------------------

    def _end_if_alone(self) -> None:
        if len(self._observation.engines) == 1:
            finish(self._observation)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
        last: bool | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Record the backward pass of `loss`."""
        del last
        usage_checks.check_loss(loss)
        weighted = weight is not None
        divisor = divisor_of(reduction, weighted=weighted, replicas=self.world.data_size)
        self._note_batch(weighted=weighted or divisor > 0, anew=weighted and not same_items)
        self._run_backward(loss, retain_graph=retain_graph)

    def _note_batch(self, *, weighted: bool, anew: bool) -> None:
        """Record the number of samples in the batch, and the Loader's total batch size."""
        self.world.draws.check_outside("engine.backward")
        current = self.world.current_batch
        batch = current.batch_of_loss(weighted=weighted, anew=anew)
        observation = self._observation
        # The first batch is the micro-batch to record. Later batches of the step are not recorded.
        if batch is not None and observation.batch is None:
            observation.batch, observation.samples = batch, batch.samples
            stream = next((s for s in current.streams if s.batch is batch), None)
            stream_batch = (stream.plan.batch_size or 0) if stream is not None else 0
            observation.total = observation.script_batch_size or stream_batch

    def _run_backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        recorder = self._observation.recorder
        recorder.active = recorder.backward = True
        if self._observation.first_backward < 0:
            self._observation.first_backward = len(recorder.operations)
        # With several engines, the graph may also contain parameters of other engines, so restrict
        # the backward pass to this engine's parameters.
        own = None
        if len(self._observation.engines) > 1:
            located = (each.parameter for each in self._spec.located())
            own = [parameter for parameter in located if parameter.requires_grad]
        context = self._spec.context
        try:
            crossing = nullcontext() if context is None else context.backward(loss, 1.0)
            with crossing, precision.PRESETS[self.settings.precision].in_backward():
                torch.autograd.backward(loss, retain_graph=retain_graph, inputs=own)
        finally:
            recorder.active = recorder.backward = False
        self.backwards += 1
        # As in the real engine, mark the batch as used by a backward pass.
        self.world.current_batch.train()

    def forward_backward(
        self,
        loss_of: Callable[..., Tensor],
        *batch: Any,
        weight: Callable[..., float | Tensor] | None = None,
        reduction: str = "mean",
        same_items: bool | None = None,
        cut: bool = True,
    ) -> Tensor:
        """Record the forward and backward pass of the first micro-batch. Return a loss of 0."""
        if self._spec.context is not None:
            self._spec.context.check_weighted(reduction, is_weighted=weight is not None)
        self.world.draws.begin()
        divisor = divisor_of(reduction, weighted=weight is not None, replicas=1)
        is_weighted = weight is not None
        # A second call in the same step is another micro-batch, which adds nothing new.
        if self.backwards and self._observation.batch is not None:
            self._end_if_alone()
        self._note_batch(weighted=is_weighted or divisor > 0, anew=is_weighted and not same_items)
        self._observation.accumulates = self._observation.pipelined = True
        parts = batch[0]
        if cut:  # split the batch into micro-batches, and record only the first one
            count = runner.microbatch_count(self.settings, batch, self._spec.data_group)
            parts = runner.split_batch(batch, count)[0][1]
        loss = loss_of(*parts)
        usage_checks.check_loss(loss)
        self._run_backward(loss)
        return torch.zeros((), dtype=torch.float64)

    def step(
        self, max_norm: float | None = None, *, closure: Callable[[], Any] | None = None
    ) -> StepStats:
        """Record that this engine has stepped, and exit the script once all of its engines have."""
        del max_norm
        # The closure runs the forward and backward pass. Optimizers such as LBFGS call it several
        # times, but one call is enough for the record.
        if closure is not None and not self.backwards:
            with torch.enable_grad():
                closure()
        # Also exit at the second step of the same engine, because another engine might never step.
        usage = any(engine.backwards for engine in self._observation.engines)
        again, self.stepped = self.stepped, True
        if usage and (again or all(engine.stepped for engine in self._observation.engines)):
            finish(self._observation)
        return StepStats(loss=0.0, grad_norm=0.0, weight=1.0, skipped=False)

    def reduce(self) -> float:
        """Return 0 in place of the gradient norm, because gradients have no values."""
        self._observation.recorder.assume("engine.reduce() = 0.0")
        return 0.0

    def zero_grad(self) -> None:
        """Do nothing, because gradients are not stored."""

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Do nothing, because gradients are not stored."""
        yield

    # -- the rest of the engine's interface ---------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of completed steps, which is always 0."""
        return 0

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has run."""
        return self.backwards > 0

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return an empty dict, because parameters have no values."""
        del model
        return {}

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None = None, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """Return an empty dict, because there is no optimizer state."""
        del optimizer, for_resume
        return {}

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Do nothing, because there is no optimizer state."""

    @property
    def loss_scale(self) -> float:
        """The loss scale, which is always 1 because losses have no values."""
        return 1.0

    @property
    def state_bytes(self) -> int:
        """The size of the states in bytes, which is always 0."""
        return 0

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Do nothing except disable gradients, because parameters are not sharded."""
        del module, write
        with torch.no_grad():
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Do nothing, because there is only one rank."""
        yield

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Do nothing, because there are no parameter values to average."""
        yield

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Do nothing, because there are no values to export."""

    def track(self, **objects: Any) -> None:
        """Do nothing, because no checkpoint is saved."""

    def save(self, folder: Any, keep: int | None = None, **options: Any) -> Path | None:
        """Do nothing and return None, because there are no values to save."""
        del folder, keep, options
        return None

    def resume(self, folder: str | PathLike[str]) -> int:
        """Return step 0 without loading a checkpoint."""
        del folder
        return 0

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Do nothing, because parameters have no storage to load values into."""

    def leave_folders(self) -> None:
        """Do nothing, because this engine never claims a checkpoint folder."""

    def describe(self) -> None:
        """Do nothing, because no real run starts."""

    def close(self) -> None:
        """Write the record and exit the script if a backward pass has run."""
        if self.backwards:
            finish(self._observation)
