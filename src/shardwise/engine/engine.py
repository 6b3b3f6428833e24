"""The engine: forward is the user's, backward and step are here.

    backward    seed autograd with the loss's weight; buckets reduce beside it (states/gradients)
    step        reduce what is left; one small exchange: weights, norm, what was used;
                update each bucket (states/optimizer_state) and publish it; clear

What a step does follows from the placement's cells alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from shardwise import config, randomness
from shardwise import world as world_module
from shardwise.collectives import Handle
from shardwise.engine import assembly, diagnosis, habits, start_lines
from shardwise.engine.assembly import Recipe
from shardwise.engine.exact_mean import Seeds, weight_of
from shardwise.engine.exchange import Totals, exchange
from shardwise.engine.window import StepStats, Window
from shardwise.errors import CollectiveError, ModelError, PlacementError, UsageError
from shardwise.model import precision, sync_batch_norm, units
from shardwise.model.buffers import Buffers
from shardwise.model.export import write_safetensors

_living: WeakSet[Engine] = WeakSet()


class Engine:
    """Trains `models` with `optimizers` over all ranks, as one process would.

    `models` and `optimizers` are one each or sequences; the objects stay the user's own and are
    changed in place. `scaler` is a GradScaler to drive. `settings` are keywords of
    `shardwise.config.Settings` (zero=2, precision="bf16-mixed" ...), overridden by the TOML file,
    the environment and the flags. All ranks make their engines in the same order.

    Attributes: `placement`, `world`, `steps` (how many were made), `settings`.

    Raises PlacementError, ModelError (nothing to train, an optimizer that cannot be sharded),
    ModelMismatch (ranks built different models).
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: optim.Optimizer | Sequence[optim.Optimizer],
        *,
        scaler: torch.amp.GradScaler | None = None,
        **settings: Any,
    ) -> None:
        self.world = world_module.current()
        config.refuse_elsewhere(settings, "engine")
        self.settings = self.world.settle(**settings)
        self.placement = self.settings.placement
        if self.placement.is_sharded("parameters"):
            raise PlacementError(
                f"{self.placement.name} shards the parameters, which this version does not do "
                "yet. The nearest row that it trains is ZERO_2: write --zero 2."
            )
        self._number = self.world.engines
        self.world.engines += 1
        self._group = self.world.collectives
        self._recipe = Recipe(
            _several(models, nn.Module),
            _several(optimizers, optim.Optimizer),
            self.placement,
            self.settings,
            self._group,
        )
        self._refuse_second_engine()
        preset = precision.PRESETS[self.settings.precision]
        self._scale = precision.LossScale(scaler, active=preset.scaled)
        self._fresh: dict[nn.Parameter, Tensor] = {}
        assembly.check_same_model(self._recipe)
        assembly.make_alike(assembly.everything(self._recipe), self._group)
        self._prepare_modules()
        self._take_over({}, None)
        self._handles = self._enter_precision(preset)
        if self.settings.compile:
            self._compile_units()
        self._seeds = Seeds(self._scale, self._group)
        self._window = Window()
        self._announced = self._averaged = False
        self.steps = 0
        for optimizer in self._recipe.optimizers:
            habits.forbid(optimizer, self._welcome)
        self._reseed()
        _living.add(self)
        start_lines.announce_engine(self.world, self._recipe, self._states)

    # -- building -------------------------------------------------------------------------

    def _take_over(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
    ) -> None:
        """Lay the three states over the models. Collective.

        `masters` and `averages` are those of an earlier layout, by parameter.
        """
        models = self._recipe.models
        synchronised: set[nn.Module] = set(sync_batch_norm.converted(models))
        self._buffers = Buffers(models, self._group, left_out=synchronised)
        self.world.feed.watch(self._buffers.before_batch)
        self._states = assembly.assemble(self._recipe, self._fresh | dict(masters), averages)
        self._fresh = {}
        self._shape = self._recipe.shape()

    def _prepare_modules(self) -> None:
        """Cast what is not cast yet, keeping its values for the masters; synchronise BatchNorm."""
        models, cast = self._recipe.models, precision.PRESETS[self.settings.precision].cast
        if cast is not None:
            self._fresh |= precision.cast_models(models, cast)
        if self.settings.sync_batch_norm and self.world.size > 1:
            sync_batch_norm.convert(models, self.world.side_channel, self.world.feed)

    def _welcome(self, group: dict[str, Any]) -> None:
        """The user's optimizer was given a parameter group: make ready for its first forward."""
        assembly.make_alike(group["params"], self._group)
        self._prepare_modules()

    def _enter_precision(self, preset: precision.Preset) -> list[RemovableHandle]:
        if preset.cast is None and preset.autocast is None:
            return []
        kind = self.world.device.type
        models = self._recipe.models
        return [h for m in models for h in precision.ForwardPrecision(preset, kind).attach(m)]

    def _compile_units(self) -> None:
        for model in self._recipe.models:
            for _, unit in units.find_units(model) or [("", model)]:
                unit.compile()

    def _refuse_second_engine(self) -> None:
        """Two engines that train the same parameter would undo each other's work."""
        taken = {t.parameter for other in _living for t in other._states.parameters.tracked}
        for tracked in self._recipe.located():
            if tracked.parameter in taken:
                raise UsageError(
                    f"{tracked.name} is already trained by another engine. Give each parameter to "
                    "one engine, or end that one first: engine.close()."
                )

    def _look_for_changes(self) -> None:
        """Notice what user code did since the last call: broke, wrote, or added parameters."""
        states = self._states
        states.parameters.check()
        if states.optimizer.has_masters and (written := states.parameters.written()):
            states.optimizer.refresh_masters(written)
            states.parameters.remember()
        if self._averaged:
            raise UsageError(
                "engine.backward inside engine.ema(): what it trains would be undone on leaving. "
                "Leave the block first."
            )
        if self._recipe.shape() == self._shape:
            return
        if self._window.backwards:
            raise UsageError(
                "Parameter groups or requires_grad changed between engine.backward and "
                "engine.step. Change them right after engine.step()."
            )
        assembly.check_same_model(self._recipe)
        self._take_over(*assembly.disassemble(self._recipe, states))

    # -- backward -------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        last: bool | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of `loss`, a scalar that is a mean over `weight` items of this rank.

        Without `weight` it is the number of samples that the Loader last gave; without a Loader,
        1. A device tensor is fine. `last=False` says that more backwards come in this step, which
        saves communication and never changes a result. Touches this engine's parameters only.
        Where gradients are sharded each backward is collective: every rank makes as many.

        Raises UsageError for a loss that is not a scalar of the graph, or when two training
        loaders are open and the weight is left out.
        """
        habits.check_loss(loss)
        self._look_for_changes()
        batch = self.world.feed.batch_of_loss(weighted=weight is not None)
        if last is None:
            last = batch.last if batch is not None else True
        weight = weight_of(weight, batch)
        if not self._announced:
            self._announced = True
            start_lines.announce_batch(self.world, self._recipe)
        seed = self._seeds.seed(loss, weight)
        self._check_gradients()
        gradients = self._states.gradients
        gradients.begin(last=last, weight=weight)
        try:
            torch.autograd.backward(loss, seed, retain_graph=retain_graph, inputs=self._inputs())
            gradients.finish()
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self._abandon()
            raise
        if not gradients.reached and not isinstance(weight, Tensor) and weight > 0:
            habits.check_reachable(loss, several=len(_living) > 1)
        self._window.add(loss, weight, batch.indices if batch is not None else ())
        if batch is not None and batch.samples == 0:
            self._buffers.restore()
        gradients.guard()

    def _inputs(self) -> list[nn.Parameter] | None:
        """This engine's parameters where the graph may hold those of another engine too."""
        if len(_living) == 1:
            return None
        return [tracked.parameter for tracked in self._states.parameters.tracked]

    def _check_gradients(self) -> None:
        """Raise, and forget the step, if user code cleared gradients that are on their way."""
        if self._states.gradients.were_cleared():
            self._abandon()
            raise habits.cleared_gradients()

    def _abandon(self) -> None:
        """A backward failed: forget this step."""
        self._states.gradients.abandon()
        self._window = Window()

    # -- step -----------------------------------------------------------------------------

    def step(self, max_norm: float | None = None) -> StepStats:
        """Average the gradients over everything since the last step, clip, update and clear.

        `max_norm` clips by the global 2-norm, as torch.nn.utils.clip_grad_norm_ does. Collective.

        Raises UsageError without a backward, NonFiniteError for a NaN or infinite gradient where
        there is no loss scale (`--nonfinite skip` skips the step instead).
        """
        if not self._window.backwards:
            raise UsageError(
                "engine.step() without engine.backward(loss) since the last step: "
                "call backward first."
            )
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm takes a number above 0, not {max_norm}.")
        self._states.parameters.check()
        self._check_gradients()
        self._states.gradients.reduce()
        totals = exchange(self._window, self._states.gradients, self._buffers, self._group)
        stats = self._decide(totals)
        if not stats.skipped:
            self._update(totals, stats, max_norm)
        self._end_step(totals)
        return stats

    def _decide(self, totals: Totals) -> StepStats:
        """The step's figures, and whether it updates anything."""
        if totals.weight == 0:
            return StepStats(loss=math.nan, grad_norm=0.0, weight=0.0, skipped=True)
        norm = math.sqrt(totals.squared_norm) / self._seeds.divisor(totals.weight)
        finite = math.isfinite(norm)
        if not finite and not self._scale.active and self.settings.nonfinite == "stop":
            error = diagnosis.nonfinite_error(self.steps, self._states, self._window, self._group)
            self._abandon()
            raise error
        return StepStats(
            loss=totals.loss / totals.weight,
            grad_norm=norm,
            weight=totals.weight,
            skipped=not finite,
        )

    def _update(self, totals: Totals, stats: StepStats, max_norm: float | None) -> None:
        """Update bucket by bucket; each is on its way to the others while the next is updated."""
        factor = 1.0 / self._seeds.divisor(totals.weight)
        if max_norm is not None:
            factor *= min(1.0, max_norm / (stats.grad_norm + 1e-6))
        states = self._states
        sent: list[Handle] = []
        sums = states.gradients.sums
        with torch.no_grad():
            for inner in states.optimizer.inners:
                states.optimizer.step(inner, sums, totals.used, factor)
                if self.placement.is_sharded("optimizer"):
                    sent += [
                        states.parameters.publish(i) for i in states.optimizer.buckets_of(inner)
                    ]
            if states.averages is not None:
                states.averages.update()
        for handle in sent:
            handle.wait()
        states.parameters.touch()

    def _end_step(self, totals: Totals) -> None:
        if totals.weight:
            self._scale.update(overflow=not math.isfinite(totals.squared_norm))
            self._seeds.follow(totals.weight)
        self._states.gradients.clear()
        if totals.several and self.settings.reduce_dtype == "fp32":
            self._states.gradients.widen()
        self._window = Window()
        for optimizer in self._recipe.optimizers:
            # What torch's schedulers look at before they warn that no step came first.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self.steps += 1
        self._reseed()

    def _reseed(self) -> None:
        """Randomness of the next step: a pure function of seed, engine, step and data rank."""
        world = self.world
        randomness.seed_everything(
            randomness.seed_from(world.seed, "step", self._number, self.steps, world.rank)
        )

    # -- whole tensors --------------------------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Inside the block the parameters of `module` (default: all) are whole, to read or write.

        With `write=True` rank 0's values are everyone's on leaving, masters included. Collective:
        every rank enters and leaves. Replicated parameters can also be read at any time.
        """
        del module  # all of them are whole where parameters are replicated
        if write and self._window.backwards:
            raise UsageError(
                "full_parameters(write=True) between engine.backward and engine.step: "
                "write before or after."
            )
        with torch.no_grad():
            yield
            if write:
                self._states.parameters.check()
                written = self.world.broadcast_object(self._states.parameters.written())
                assembly.make_alike(assembly.everything(self._recipe), self._group)
                self._states.optimizer.refresh_masters(written)
                self._states.parameters.remember()

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside the block the parameters hold their moving average (`ema_decay`). Collective."""
        if self._states.averages is None:
            raise UsageError(
                "engine.ema() without a moving average: give --ema-decay 0.999 or ema_decay=0.999."
            )
        if self._window.backwards:
            raise UsageError(
                "engine.ema() between engine.backward and engine.step: enter it after the step."
            )
        with torch.no_grad():
            context = self._states.averages.swapped_in()
            context.__enter__()
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = False
            context.__exit__(None, None, None)

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write `model` (default: the only one) as one plain safetensors file, from rank 0.

        Names, shapes and dtypes are the plain model's; tied weights are written once. Inside
        `engine.ema()` the averages are written.
        """
        if model is None:
            if len(self._recipe.models) != 1:
                raise UsageError(
                    "This engine has several models: say which, engine.export(path, model)."
                )
            model = self._recipe.models[0]
        if self.world.is_main:
            write_safetensors(model, path)

    def optimizer_state_dict(self, optimizer: optim.Optimizer | None = None) -> dict[str, Any]:
        """The state_dict that `optimizer` (default: the only one) would have in one process.

        Every rank gets the whole of it. Collective.
        """
        if optimizer is None:
            if len(self._recipe.optimizers) != 1:
                raise UsageError("This engine has several optimizers: say which.")
            optimizer = self._recipe.optimizers[0]
        # A parameter that was frozen on the way has left its state with the user's optimizer.
        states: dict[Any, Any] = dict(optimizer.state)
        states |= self._states.gathering.optimizer_state()
        numbers: dict[nn.Parameter, int] = {}
        groups = []
        for group in optimizer.param_groups:
            members = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
            groups.append({**group, "params": members})
        return {
            "state": {number: states[p] for p, number in numbers.items() if p in states},
            "param_groups": groups,
        }

    def close(self) -> None:
        """Give models and optimizers back as plain ones, optimizer state included. Collective.

        Weights that were cast to 16 bit stay so; the engine cannot be used afterwards.
        """
        assembly.disassemble(self._recipe, self._states)
        for handle in self._handles:
            handle.remove()
        sync_batch_norm.restore(self._recipe.models)
        for optimizer in self._recipe.optimizers:
            habits.allow(optimizer)
        _living.discard(self)

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 where the precision needs none."""
        return self._scale.value

    @property
    def state_bytes(self) -> int:
        """Bytes of the training states that this rank holds now, padding included."""
        return self._states.state_bytes


def _several(given: Any, kind: type[Any]) -> tuple[Any, ...]:
    several = (given,) if isinstance(given, kind) else tuple(given)
    wrong = [item for item in several if not isinstance(item, kind)]
    if wrong or not several:
        shown = type(wrong[0]).__name__ if wrong else "nothing"
        raise ModelError(f"sw.Engine(models, optimizers) takes {kind.__name__}s, not {shown}.")
    return several
