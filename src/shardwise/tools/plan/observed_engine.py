"""ObservedEngine replaces sw.Engine in an observed script: parameters lose their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from shardwise.model import precision
from shardwise.model.activations import Activations
from shardwise.model.module_hooks import attach
from shardwise.parallel.pipeline import runner
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.step_totals import StepStats
from shardwise.tools.plan.engine_parts import (
    ObservedParameter,
    note_layers,
    note_spec,
    replace_in,
    split_first_part,
)
from shardwise.tools.plan.observation import Observation, finish
from shardwise.tools.plan.record import UnitUse
from shardwise.world.world import World
from shardwise.world.world import current as current_world


class ObservedEngine(Engine):
    """An engine without states. It records backward, and its first step ends the script."""

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: optim.Optimizer | Sequence[optim.Optimizer],
        *,
        scaler: GradScaler | None = None,
        tensor_plan: TensorPlan | None = None,
        **settings: Any,
    ) -> None:
        # A GradScaler only changes values, and there are none.
        del scaler
        observation = Observation.current
        assert observation is not None
        self._observation = observation
        self.world = world = current_world()
        config.refuse_elsewhere(settings, "engine")
        self.settings = world.settle_engine(settings)
        self.placement = self.settings.placement
        number, world.engines = world.engines, world.engines + 1
        world.expect_no_engine()
        spec = spec_of(world, self.settings, models, optimizers, tensor_plan)
        if observation.tensor > 1:
            spec = split_first_part(spec, tensor_plan or {}, observation.tensor)
        self._spec = spec
        self.backwards = 0
        self.stepped = False
        self._depth = 0
        self._stack: list[tuple[int, int, int]] = []
        """Units whose forwards are running: the unit, the enclosing unit, the first operation."""
        noted = note_spec(spec, number, len(observation.units), len(observation.groups))
        observation.units += noted.units
        observation.groups += noted.groups
        observation.parameters += noted.parameters
        layers, inside = note_layers(spec, noted.parameters)
        observation.layers += layers
        self._take_memory(noted.parameters)
        self._enter_settings(world)
        self._hook_modules(noted.modules, inside)
        observation.engines.append(self)

    # -- making -----------------------------------------------------------------------------

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models of the engine."""
        return self._spec.models

    def _take_memory(self, parameters: Sequence[ObservedParameter]) -> None:
        """Replace each parameter by a fake one, in all models and optimizers."""
        cast = precision.PRESETS[self.settings.precision].cast
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for each in parameters:
            old, named = each.named.parameter, each.named
            if cast is not None and old.is_floating_point():
                named.dtype = cast if precision.is_cast(named.places, cast) else old.dtype
            with self._observation.fake:
                like = torch.empty_strided(named.shape, named.strides, dtype=named.dtype)
            new = nn.Parameter(like, requires_grad=old.requires_grad)
            # Parameters count as states (layout.py), not as activations.
            self._observation.recorder.ignore(new)
            replaced[old] = new
            named.parameter = new
            if new.requires_grad:
                new.register_post_accumulate_grad_hook(self._arrival(each))  # type: ignore[no-untyped-call]
        # Tied weights are replaced everywhere by the same new parameter.
        for module in (m for model in self._spec.models for m in model.modules()):
            replace_in(module, replaced)
        for optimizer in self._spec.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [replaced.get(p, p) for p in group["params"]]
            # State for the old parameters would keep their memory alive.
            optimizer.state.clear()

    def _arrival(self, each: ObservedParameter) -> Callable[[Tensor], None]:
        """Return a hook that notes when a gradient is complete, and frees it."""
        # The real engine moves the gradient into a bucket, so `param.grad` frees its memory here.
        recorder = self._observation.recorder

        def arrived(parameter: Tensor) -> None:
            each.arrived = len(recorder.operations) - 1
            parameter.grad = None

        return arrived

    def _enter_settings(self, world: World) -> None:
        """Make forwards run in the precision and with the activations of the settings."""
        spec, preset = self._spec, precision.PRESETS[self.settings.precision]
        if preset.cast is not None:
            precision.cast_models(spec.models, preset.cast)
        for model in spec.models:
            for buffer in model.buffers():
                self._observation.recorder.ignore(buffer)
                self._observation.buffer_bytes += buffer.numel() * buffer.element_size()
            if preset.cast is not None or preset.autocast is not None:
                precision.ForwardPrecision(preset, "cpu").attach(model)
        # Recomputation shows in the record as forwards inside backward.
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
                # always_call: torch's checkpointing ends a recomputation early by raising in a
                # forward, and the unit must be popped from the stack then, too.
                attach(module.register_forward_hook, self._leaving(number), always_call=True)

    def _entering(self, number: int, layer: int) -> Callable[..., None]:
        """Return the hook before the forward of a module, which is a unit, a layer, or neither."""
        recorder = self._observation.recorder

        def enter(module: nn.Module, args: Any) -> None:
            del module, args
            # Only the outermost forward starts a recording. Forwards inside backward recompute
            # activations, and a forward without gradients is an evaluation.
            if not self._depth and torch.is_grad_enabled() and not recorder.backward:
                # The forward of a second batch has nothing new to record.
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
        """Record the backward of `loss`."""
        del last
        usage_checks.check_loss(loss)
        weighted = weight is not None
        divisor = divisor_of(reduction, weighted=weighted, replicas=self.world.data_size)
        self._note_batch(weighted=weighted or divisor > 0, anew=weighted and not same_items)
        self._run_backward(loss, retain_graph=retain_graph)

    def _note_batch(self, *, weighted: bool, anew: bool) -> None:
        """Note the number of samples of the batch, and the total batch size of the Loader."""
        self.world.draws.check_outside("engine.backward")
        current = self.world.current_batch
        batch = current.batch_of_loss(weighted=weighted, anew=anew)
        observation = self._observation
        # The first batch defines the micro-batch. Later ones of the step are not recorded.
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
        # With several engines, the graph may also contain parameters of another one.
        # With one engine all leaves of the graph are its own, and `inputs` is not necessary.
        own = None
        if len(self._observation.engines) > 1:
            located = (each.parameter for each in self._spec.located())
            own = [parameter for parameter in located if parameter.requires_grad]
        try:
            torch.autograd.backward(loss, retain_graph=retain_graph, inputs=own)
        finally:
            recorder.active = recorder.backward = False
        self.backwards += 1
        # As in the real engine: marks the batch as used by a backward.
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
        """Record forward and backward of the first micro-batch. Return a loss without a value."""
        self.world.draws.begin()
        divisor = divisor_of(reduction, weighted=weight is not None, replicas=1)
        is_weighted = weight is not None
        # A second call in one step is another micro-batch, which is like the first.
        if self.backwards and self._observation.batch is not None:
            self._end_if_alone()
        self._note_batch(weighted=is_weighted or divisor > 0, anew=is_weighted and not same_items)
        self._observation.accumulates = self._observation.pipelined = True
        parts = batch[0]
        if cut:  # into micro-batches: only the first one is recorded
            count = runner.microbatch_count(self.settings, batch, self._spec.data_group)
            parts = runner.split_batch(batch, count)[0][1]
        loss = loss_of(*parts)
        usage_checks.check_loss(loss)
        self._run_backward(loss)
        return torch.zeros((), dtype=torch.float64)

    def step(
        self, max_norm: float | None = None, *, closure: Callable[[], Any] | None = None
    ) -> StepStats:
        """End the script after all of its engines have stepped."""
        del max_norm
        # The closure runs forward and backward. Optimizers such as LBFGS call it several times, but
        # one call shows all that the record needs.
        if closure is not None and not self.backwards:
            with torch.enable_grad():
                closure()
        # A second step of the same engine also ends it: another engine may never step.
        usage = any(engine.backwards for engine in self._observation.engines)
        again, self.stepped = self.stepped, True
        if usage and (again or all(engine.stepped for engine in self._observation.engines)):
            finish(self._observation)
        return StepStats(loss=0.0, grad_norm=0.0, weight=1.0, skipped=False)

    def reduce(self) -> float:
        """Return 0, because the norm has no value."""
        self._observation.recorder.assume("engine.reduce() = 0.0")
        return 0.0

    def zero_grad(self) -> None:
        """Do nothing: no gradients are kept."""

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Do nothing: no gradients are kept."""
        yield

    # -- the rest of the engine's interface ---------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps, which is 0."""
        return 0

    @property
    def has_gradients(self) -> bool:
        """Whether there was a backward."""
        return self.backwards > 0

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return an empty dict: there are no values to save."""
        del model
        return {}

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None = None, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """Return an empty dict: there are no values to save."""
        del optimizer, for_resume
        return {}

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Do nothing: there are no values to load."""

    @property
    def loss_scale(self) -> float:
        """A loss scale of 1: values do not matter here."""
        return 1.0

    @property
    def state_bytes(self) -> int:
        """0, because no state exists."""
        return 0

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Do nothing: parameters are whole, without values."""
        del module, write
        with torch.no_grad():
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Do nothing: there is one rank."""
        yield

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Do nothing: averages have no values."""
        yield

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Do nothing: there are no values to export."""

    def track(self, **objects: Any) -> None:
        """Do nothing: nothing is saved."""

    def save(self, folder: Any, keep: int | None = None, **options: Any) -> Path | None:
        """Do nothing: there are no values to save."""
        del folder, keep, options
        return None

    def resume(self, folder: str | PathLike[str]) -> int:
        """Return step 0 without loading."""
        del folder
        return 0

    def load(
        self, path: str | PathLike[str], *, strict: bool = True, model_only: bool = False
    ) -> None:
        """Do nothing: values do not matter here."""

    def leave_folders(self) -> None:
        """Do nothing: no folder was claimed."""

    def describe(self) -> None:
        """Do nothing: no run starts."""

    def close(self) -> None:
        """End the script if there was a backward."""
        if self.backwards:
            finish(self._observation)
