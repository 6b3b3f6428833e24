"""The user's models and optimizers while an engine has them: made ready, laid out, given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn, optim

from shardwise.engine import (
    build,
    consistency,
    initial_values,
    optimizer_states,
    pipeline_parallel,
    tensor_parallel,
    usage_checks,
    whole_tensors,
)
from shardwise.engine.engine_spec import Recipe
from shardwise.errors import CheckpointMismatch, ConfigError, ModelError, UsageError
from shardwise.model import precision, sync_batch_norm, units
from shardwise.model.activations import Activations
from shardwise.model.buffers import Buffers
from shardwise.model.forward_events import Forwards
from shardwise.model.micro_shard_buffers import MicroShardBuffers
from shardwise.model.module_hooks import Hooked
from shardwise.parallel.pipeline import install
from shardwise.parallel.tensor.plan import Plan
from shardwise.world import World


class Takeover:
    """What an engine holds: `states`, laid over what `recipe` names, `buffers`, `activations`.

    States are laid out anew when parameter groups or requires_grad change between steps;
    `in_step` tells whether a step is under way; `plan` is the user's for what is to be split.
    Making it is collective.
    """

    def __init__(
        self, world: World, recipe: Recipe, in_step: Callable[[], bool], plan: Plan | None = None
    ) -> None:
        self.recipe = recipe
        self._world = world
        self._in_step = in_step
        self._fresh: dict[nn.Parameter, Tensor] = {}
        self._written: set[int] = set()
        usage_checks.check_embeddings(recipe.models, recipe.placement, workers=world.data_size)
        consistency.check_same_model(recipe)
        if recipe.line is not None:
            pipeline_parallel.share_out(recipe, recipe.line)
        self._give_memory()
        consistency.make_state_alike(recipe)
        if recipe.split is not None:
            tensor_parallel.split(recipe, recipe.split, plan)
        if recipe.line is not None:
            recipe.line.split = recipe.split
        try:
            self._prepare_modules()
            self.buffers = self._all_buffers()
            self._let_go()
            recipe.uses.watch()
            self._lay({}, None)
        except (ConfigError, ModelError):  # raised by all ranks alike: the model stays plain
            self._put_together()
            raise
        self._handles = self._enter_precision()
        if recipe.settings.compile and recipe.settings.activations == "kept":
            self._compile_units()
        self.activations = Activations(
            recipe.models, recipe.settings, world.device, rank=world.rank
        )
        self._forwards = Forwards(recipe.models, recipe.settings.units)
        if recipe.line is not None:
            install(recipe.line, recipe.models[0])
        keeper = usage_checks.Keeper(
            WeakMethod(self._welcome),
            WeakMethod(self.told_state),
            WeakMethod(self.check_state),
            WeakMethod(self.take_state),
            alone=world.size == 1,
        )
        for optimizer in recipe.optimizers:
            usage_checks.forbid(optimizer, keeper)

    def _lay(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
    ) -> None:
        """Lay the three states over the models.

        `masters` and `averages` are those of an earlier layout, by parameter.
        """
        self.states = build.assemble(self.recipe, self._fresh | dict(masters), averages)
        self._fresh, self._written = {}, set()
        self._shape = self.recipe.shape()
        follow = WeakMethod(self.follow_changes)
        self.recipe.doors.before = lambda: (call := follow()) and call()

    def _lay_anew(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
    ) -> None:
        """Lay them again; gradients that had become wide stay so."""
        wide = self.states.gradients.wide
        self._lay(masters, averages)
        if wide:
            self.states.gradients.widen()

    # -- making ready ---------------------------------------------------------------------

    def _give_memory(self) -> None:
        """Fill what was built without memory, where it will be whole; then all are alike."""
        by_reset = initial_values.fill_unrecorded(self.recipe.models)
        if by_reset:
            self._world.print(
                f"shardwise: {len(by_reset)} parameters had no memory and no record "
                f"({by_reset[0]} ...): they start from reset_parameters, not from the values of "
                "a plain build. Build the model inside with sw.on_meta() for those."
            )
        recipe, located = self.recipe, self.recipe.located()
        real, line = consistency.everything(recipe), recipe.line
        if line is not None and recipe.split is None:
            line.custody.leave_unbuilt()
            here = [tracked for tracked in located if line.has(tracked.parameter)]
            fresh = [tracked.parameter for tracked in here if tracked.parameter.is_meta]
            initial_values.make_all_real(here, recipe.device)
            initial_values.make_alike(fresh, recipe.stage)
        elif recipe.split is not None or not recipe.placement.is_sharded("parameters"):
            initial_values.make_all_real(located, recipe.device)
            real = consistency.everything(recipe)
        initial_values.make_alike(real, recipe.run)

    def _prepare_modules(self) -> None:
        """Cast what is not cast yet, keeping its values for the masters; synchronise BatchNorm."""
        models, settings = self.recipe.models, self.recipe.settings
        cast = precision.PRESETS[settings.precision].cast
        if cast is not None:
            self._fresh |= precision.cast_models(models, cast)
            precision.widen_states(self.recipe.optimizers, cast)
        if settings.sync_batch_norm and self._world.data_size > 1:
            sync_batch_norm.convert(models, self._world.gather_order, self._world.feed)

    def _all_buffers(self) -> Buffers:
        """The models' buffers, over every layout of the states."""
        models, group, shards = self.recipe.models, self.recipe.stage, self.recipe.shards
        found = (
            Buffers(models, group, self._synchronised)
            if shards is None
            else MicroShardBuffers(models, group, shards)
        )
        self._world.feed.watch(found.before_batch)
        return found

    def _let_go(self) -> None:
        """Let go of what other ranks of the replica have: layers, and the state of these."""
        if (line := self.recipe.line) is None:
            return
        line.custody.let_go()
        self._fresh = {p: value for p, value in self._fresh.items() if line.has(p)}
        for optimizer in self.recipe.optimizers:
            for parameter in [p for p in optimizer.state if not line.has(p)]:
                del optimizer.state[parameter]

    def _put_together(self) -> None:
        """Give every rank the whole model and all of the optimizers' state. Collective."""
        recipe = self.recipe
        recipe.uses.forget()
        shapes: dict[nn.Parameter, tuple[int, ...]] = {}
        if recipe.line is not None:
            recipe.line.close()
        if recipe.split is not None:
            shapes = {p: shard.shape for p, shard in recipe.split.shards.items()}
            recipe.split.undo(recipe.optimizers, recipe.is_here)
        if recipe.line is not None:
            recipe.line.custody.undo(recipe.models[0], recipe.optimizers, shapes)

    @property
    def _synchronised(self) -> set[nn.Module]:
        """The modules that keep their buffers in step themselves."""
        return set(sync_batch_norm.converted(self.recipe.models))

    def _enter_precision(self) -> list[Hooked]:
        preset = precision.PRESETS[self.recipe.settings.precision]
        if preset.cast is None and preset.autocast is None:
            return []
        kind = self.recipe.device.type
        models = self.recipe.models
        return [h for m in models for h in precision.ForwardPrecision(preset, kind).attach(m)]

    def _compile_units(self) -> None:
        for model in self.recipe.models:
            for _, unit in units.find_units(model, self.recipe.settings.units) or [("", model)]:
                unit.compile()

    # -- changes on the way ---------------------------------------------------------------

    def _welcome(self, group: dict[str, Any]) -> None:
        """The user's optimizer was given a parameter group: make ready for its first forward.

        Raises UsageError where layers are shared out: nobody knows whose the new ones are.
        """
        if self.recipe.line is not None:
            raise UsageError(
                f"add_param_group after sw.Engine(...) with --pipeline "
                f"{self.recipe.line.group.size}: which worker has these layers was decided when "
                "the engine was made. Add the group before, or start without --pipeline."
            )
        shown = self.states.shown
        resting = [] if shown is None else shown.residency.resting()
        new = [p for p in group["params"] if not any(p is known for known in resting)]
        # Of what is split each rank of a replica has another part: its twins' values, not rank 0's.
        split = [p for p in new if self.recipe.shard_of(p) is not None]
        initial_values.make_alike(
            [p for p in new if self.recipe.shard_of(p) is None], self.recipe.run
        )
        initial_values.make_alike(split, self.recipe.group)
        self._prepare_modules()
        self.buffers.meet(self._synchronised)

    def look_for_changes(self) -> None:
        """Notice what user code did since the last call: broke, wrote, or added parameters."""
        states = self.states
        states.parameters.check()
        self.take_in_writes()
        is_awaited = states.shown is not None and states.shown.residency.is_awaited
        if is_awaited and not self._shape.fits(self.recipe.shape()):
            raise UsageError(
                "Parameter groups or requires_grad changed between a forward and "
                "engine.backward. Change them right after engine.step()."
            )
        self.follow_changes()

    def take_in_writes(self) -> None:
        """Let the masters have what user code has written into parameters, before these change."""
        states = self.states
        alone = states.shown is not None or self._world.size == 1
        if alone and not states.optimizer.has_masters:
            return
        if written := states.parameters.written():
            if states.optimizer.has_masters:
                states.optimizer.refresh_masters(written)
            if not alone:
                self._written |= written
            states.parameters.remember()

    @property
    def has_written(self) -> bool:
        """Whether user code has written into replicated parameters that other ranks have too."""
        return bool(self._written)

    def check_written(self) -> None:
        """Raise ModelMismatch unless all ranks have written the same. Collective."""
        written, self._written = self._written, set()
        consistency.check_written(self.recipe, self.states.parameters.tracked, written)

    def follow_changes(self) -> None:
        """Lay out anew if parameter groups or requires_grad changed. Collective then."""
        if self._shape.fits(self.recipe.shape()):
            return
        if self._in_step():
            raise UsageError(
                "Parameter groups or requires_grad changed between engine.backward and "
                "engine.step. Change them right after engine.step()."
            )
        consistency.check_same_model(self.recipe)
        self.buffers.meet(self._synchronised)
        self._lay_anew(*build.disassemble(self.recipe, self.states))

    def told_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """The state_dict that `optimizer` would have in one process. Collective."""
        return whole_tensors.optimizer_state_dict(self.recipe, self.states, optimizer)

    def check_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Raise, on all ranks alike, unless `optimizer` can go on from `state` now. Collective."""
        if self._in_step():
            raise UsageError(
                f"{type(optimizer).__name__}.load_state_dict between engine.backward and "
                "engine.step: load it after the step."
            )
        self.look_for_changes()
        failure = optimizer_states.misfit(optimizer, state)
        consistency.agree(self.recipe.run, failure, CheckpointMismatch)

    def take_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Let `optimizer` go on from `state`, a plain state_dict that was checked. Collective."""
        masters, averages = build.disassemble(self.recipe, self.states)
        optimizer_states.give(optimizer, state)
        self._lay_anew(masters, averages)

    def make_room_for_averages(self, names: Set[str]) -> bool:
        """Lay out anew where one of the parameters `names` is frozen and has no average, though
        averages are kept; whether that was so. Collective."""
        if self.states.averages is None:
            return False
        groups = [group for o in self.recipe.optimizers for group in o.param_groups]
        resting = {parameter for group in groups for parameter in group["params"]}
        resting -= {tracked.parameter for tracked in self.states.parameters.tracked}
        lacking = {
            t.parameter: torch.zeros(()).expand(t.shape)
            for t in self.recipe.located()
            if t.parameter in resting and t.name in names and self.recipe.is_here(t.parameter)
        }
        if not any(self.recipe.run.gather_objects(bool(lacking))):
            return False
        masters, averages = build.disassemble(self.recipe, self.states)
        self._lay_anew(masters, (averages or {}) | lacking)
        return True

    def end(self) -> None:
        """Give everything back as it was, trained. Collective."""
        build.disassemble(self.recipe, self.states)
        self._put_together()
        self.recipe.leave_groups()
        self.activations.close()
        self.recipe.doors.remove()
        self._forwards.close()
        for handle in self._handles:
            handle.remove()
        sync_batch_norm.restore(self.recipe.models)
        for optimizer in self.recipe.optimizers:
            usage_checks.allow(optimizer)
