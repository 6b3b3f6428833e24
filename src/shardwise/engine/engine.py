"""The engine: forward is the user's, backward and step are here.

    backward    seed autograd with the loss's weight; buckets reduce beside it (backwards)
    step        reduce what is left; one small exchange; update, publish, clear (stepping)

What a step does follows from the placement's cells alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn, optim

from shardwise import config
from shardwise.engine import (
    describe,
    diagnosis,
    exact_mode,
    pipeline_parallel,
    start_lines,
    tensor_parallel,
    whole_tensors,
)
from shardwise.engine.accumulation import Window
from shardwise.engine.backward import living
from shardwise.engine.build import States
from shardwise.engine.checkpoints import Checkpoints
from shardwise.engine.engine_spec import Recipe
from shardwise.engine.exact_mean import Seeds
from shardwise.engine.optimizer_options import Options
from shardwise.engine.pipeline_runner import Pipelining
from shardwise.engine.step import Stepping
from shardwise.engine.step_statistics import ExactParts, Parts
from shardwise.engine.user_objects import Takeover
from shardwise.errors import ModelError, UsageError
from shardwise.model import precision
from shardwise.parallel.pipeline import LayerTimes
from shardwise.parallel.tensor.plan import Plan
from shardwise.world import current as current_world


class Engine(Stepping):
    """Trains `models` with `optimizers` over all ranks, as one process would.

    `models` and `optimizers` are one each or sequences; the objects stay the user's own and are
    changed in place. `scaler` is a GradScaler to drive. `settings` are keywords of
    `shardwise.config.Settings` (zero=2, precision="bf16-mixed" ...), overridden by the TOML file,
    the environment and the flags. All ranks make their engines in the same order.

    With `--tensor` layers are split over the ranks of a replica: known shapes are found, and
    `tensor_plan` says how others are, by patterns of module names: `{"blocks.*.up": "colwise",
    "blocks.*.down": "rowwise", "head": "whole"}`; docs/parallel.md has all of it.

    With `--pipeline` they are shared out: each worker has some, and `forward_backward` sends a
    batch through all of them in micro-batches; docs/parallel.md.

    Saving and resuming are `Resumable`'s: `track`, `save`, `resume`, `load`.

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
        tensor_plan: Plan | None = None,
        **settings: Any,
    ) -> None:
        self.world = current_world()
        config.refuse_elsewhere(settings, "engine")
        self.settings = self.world.settle_engine(settings)
        self.placement = self.settings.placement
        self._number = self.world.engines
        self.world.engines += 1
        self.world.expect_no_engine()
        self._group = self.world.collectives
        shards = exact_mode.shards_of(self.settings, self._group)
        self._parts = Parts(self.world.data_rank) if shards is None else ExactParts(shards)
        self._recipe = Recipe(
            _several(models, nn.Module),
            _several(optimizers, optim.Optimizer),
            self.placement,
            self.settings,
            self._group,
            self.world.data,
            self.world.device,
            self.world.gather_order,
            shards,
            tensor_parallel.begin(self.world, self.settings, tensor_plan),
            pipeline_parallel.begin(self.world, self.settings, _several(models, nn.Module)),
            self.world.stage,
        )
        self._refuse_second_engine()
        self._window = Window()
        self.world.unstepped.watch(self._window)
        self._options = Options(self._recipe.optimizers)
        in_step = WeakMethod(self._is_in_step)
        self._held = Takeover(
            self.world, self._recipe, lambda: bool((ask := in_step()) and ask()), tensor_plan
        )
        scaled = precision.PRESETS[self.settings.precision].scaled
        self._scale = precision.LossScale(scaler, active=scaled)
        self._seeds = Seeds(self._scale, self._recipe.group, self._parts)
        line = self._recipe.line
        self._pipelining = None if line is None else Pipelining(line, self.settings, self._seeds)
        self._checkpoints = Checkpoints(
            self.world, self._held, self._scale, self._seeds, self._number
        )
        self._timing = self._time_layers()
        self._announced = self._averaged = self._uneven = False
        self._skips = diagnosis.Skips(scaled=self._scale.active)
        self.world.feed.allow_uneven(self._while_some_sit_out)
        self.steps = 0
        self._totals = None
        self._begin_draws(self._recipe.models)
        living.add(self)
        start_lines.announce_engine(self.world, self._recipe, self._states)
        start_lines.announce_activations(self.world, self._recipe, self._held.activations)

    def _time_layers(self) -> LayerTimes | None:
        """What times the layers, where that is asked for; of several models those of the first."""
        path = self.settings.time_layers
        if path is None or self._number or not self.world.is_main:
            return None
        return LayerTimes(self._recipe.models[0], self.settings.units, path)

    @property
    def _states(self) -> States:
        return self._held.states

    def _refuse_second_engine(self) -> None:
        """Two engines that train the same parameter would undo each other's work."""
        taken = {t.parameter for other in living for t in other._states.parameters.tracked}
        for tracked in self._recipe.located():
            if tracked.parameter in taken:
                raise UsageError(
                    f"{tracked.name} is already trained by another engine. Give each parameter to "
                    "one engine, or end that one first: engine.close()."
                )

    def _is_in_step(self) -> bool:
        return self._window.backwards > 0

    def _tell_line(self) -> None:
        if self._recipe.line is not None:
            self._recipe.line.loans.changed()

    # -- whole tensors --------------------------------------------------------------------

    @contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Inside the block the parameters of `module` (default: all) are whole, to read or write.

        With `write=True` rank 0's values are everyone's on leaving, masters included; between
        backward and step the gradients stay what they are (SAM). Collective: every rank enters and
        leaves. Replicated parameters can also be read at any time.
        """
        if write and self._window.backwards and self._recipe.line is not None:
            raise UsageError(
                "full_parameters(write=True) between engine.backward and engine.step with "
                "--pipeline: write before or after."
            )
        if write and self._averaged:
            raise UsageError(
                "full_parameters(write=True) inside engine.ema(), where parameters are averages "
                "for the time of the block: write before or after."
            )
        with whole_tensors.full_parameters(self._recipe, self._states, module, write=write):
            yield

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Inside the block ranks may run different numbers of forwards: generation whose length
        differs, evaluation on rank 0 alone.

        All ranks enter and leave; a rank that leaves serves the gathers of the others until all
        have left. Without sharded parameters it does nothing. No training inside. Raises UsageError
        with `--pipeline`, where a forward takes all workers of a replica.
        """
        if self._recipe.line is not None:
            raise UsageError(
                "engine.uneven() with --pipeline: no worker has all layers, so none can run a "
                "forward alone. Inside with engine.full_parameters() each can."
            )
        shown = self._states.shown
        with nullcontext() if shown is None else shown.residency.uneven():
            self._uneven = True
            try:
                yield
            finally:
                self._uneven = False

    def _while_some_sit_out(self) -> AbstractContextManager[None]:
        """Around a batch of an evaluation of which some ranks have no sample: they serve the
        gathers of the others."""
        shown = self._states.shown
        if self not in living or self._uneven or shown is None or not self.gathers_together:
            return nullcontext()
        return shown.residency.uneven()

    @property
    def gathers_together(self) -> bool:
        """Whether a forward of this engine's models takes all ranks."""
        shown = self._states.shown
        return shown is not None and shown.residency.is_collective

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside the block the parameters hold their moving average (`ema_decay`). Collective.

        It is the average of what the optimizers train; a parameter that was never trained is as it
        is.
        """
        if self._states.averages is None:
            raise UsageError(
                "engine.ema() without a moving average: give --ema-decay 0.999 or ema_decay=0.999."
            )
        if self._window.backwards:
            raise UsageError(
                "engine.ema() between engine.backward and engine.step: enter it after the step."
            )
        self._held.look_for_changes()
        with torch.no_grad():
            context = self._states.averages.swapped_in()
            context.__enter__()
        self._averaged = True
        self._tell_line()
        try:
            yield
        finally:
            self._averaged = False
            context.__exit__(None, None, None)
            self._tell_line()

    def _is_between_steps(self) -> bool:
        return self._window.backwards == 0 and not self._averaged

    def _refuse_in_step(self, call: str) -> None:
        if self._window.backwards:
            raise UsageError(
                f"{call} between engine.backward and engine.step: call it after the step."
            )
        if self._averaged:
            raise UsageError(f"{call} inside engine.ema(): leave the block first.")

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write `model` (default: the only one) as one plain file, from rank 0: as torch.save
        does where `path` ends in .pt, .pth or .bin, else as safetensors.

        Names, shapes and dtypes are the plain model's; tied weights are written once. Inside
        `engine.ema()` the averages are written. Collective where parameters are sharded: every
        rank calls it, and rank 0 holds the whole model while it writes. With `--trial` nothing is
        written.
        """
        if not self.world.settings.trial:
            whole_tensors.export(self._recipe, self._states, path, model)

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """The state_dict of `model` (default: the only one) with whole tensors, on rank 0; on the
        other ranks an empty one.

        Its tensors are on the CPU and nobody else's; tied weights are one tensor. Collective where
        parameters are sharded, and then rank 0 holds the whole model while it is copied.
        """
        return whole_tensors.model_state_dict(self._recipe, self._states, model)

    def optimizer_state_dict(self, optimizer: optim.Optimizer | None = None) -> dict[str, Any]:
        """The state_dict that `optimizer` (default: the only one) would have in one process.

        Every rank gets the whole of it. Collective.
        """
        return whole_tensors.optimizer_state_dict(self._recipe, self._states, optimizer)

    def load_optimizer_state_dict(
        self, state: Mapping[str, Any] | None, optimizer: optim.Optimizer | None = None
    ) -> None:
        """Let `optimizer` (default: the only one) go on from `state`, the state_dict of a plain
        one over the same parameters, in the dtypes that its tensors have.

        Every rank gives it, or rank 0 alone, the others None. Collective. Raises
        CheckpointMismatch where it is another optimizer's, UsageError between backward and step
        and for a model in parts (`--tensor`, `--pipeline`).
        """
        self._refuse_in_step("engine.load_optimizer_state_dict")
        if self._recipe.split is not None or self._recipe.line is not None:
            raise UsageError(
                "engine.load_optimizer_state_dict with --tensor or --pipeline, where the state is "
                "in parts: load it into the optimizer before sw.Engine(...)."
            )
        if not all(self._recipe.run.gather_plain(state is not None)):
            state = self._recipe.run.gather_objects(state if self.world.is_main else None)[0]
        if state is None:
            raise UsageError("engine.load_optimizer_state_dict takes a state_dict on rank 0.")
        face = whole_tensors.only(self._recipe, optimizer)
        self._held.check_state(face, state)
        self._held.take_state(face, state)

    def describe(self) -> None:
        """Print, on rank 0, a table of units and buckets with the bytes per rank and tier."""
        if self.world.is_main:
            name = self.world.collectives.name
            describe.show(describe.table_of(self._recipe, self._states, name))

    def close(self) -> None:
        """Give models and optimizers back as plain ones, optimizer state included. Collective.

        Weights that were cast to 16 bit stay so; the engine cannot be used afterwards.
        """
        self._stop_watching()
        try:
            self._checkpoints.wait()
        finally:
            self._checkpoints.leave()
            self.world.preemption.leave_out(self._save_at_the_end)
            self._held.end()
            if self._timing is not None:
                self._timing.close()
            living.discard(self)

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 where the precision needs none."""
        return self._scale.value

    @property
    def state_bytes(self) -> int:
        """Bytes of the training states that this rank holds now, padding included."""
        return self._states.state_bytes


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
