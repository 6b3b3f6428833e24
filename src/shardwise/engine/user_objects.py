"""UserObjects prepares the user's models and optimizers, follows their changes, gives them back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint.agreement import agree
from shardwise.checkpoint.attribute_values import OptimizerAttributes
from shardwise.engine import (
    build,
    consistency,
    initial_values,
    island_states,
    pipeline_parallel,
    plain_state_dict,
    tensor_parallel,
    usage_checks,
    whole_optimizer,
)
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.gradient_weighting import GradientWeighting
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.errors import CheckpointMismatch, ConfigError, ModelError, UsageError
from shardwise.islands.anchor import Kept
from shardwise.model import precision, sync_batch_norm, units
from shardwise.model.activations import Activations
from shardwise.model.buffers import Buffers
from shardwise.model.forward_events import ForwardEvents
from shardwise.model.micro_shard_buffers import MicroShardBuffers
from shardwise.model.module_hooks import Hooked
from shardwise.model.optimizer_access import StateOfEngine
from shardwise.parallel.pipeline import install
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.optimizer.optimizer_kind import is_torchs
from shardwise.world.world import World

living: WeakSet[UserObjects] = WeakSet()
"""Those of all engines of this process that are not closed."""


class UserObjects:
    """The models and optimizers of `spec` in an engine: `states`, `buffers`, `activations`.

    States are laid out anew when parameter groups or requires_grad change between steps, of which
    `accumulation` knows; plain state_dicts have what `weighting` divides by; `plan` is the user's
    for tensor parallelism. Making it is collective.
    """

    def __init__(
        self,
        world: World,
        spec: EngineSpec,
        accumulation: LossAccumulation,
        weighting: GradientWeighting,
        plan: TensorPlan | None = None,
    ) -> None:
        self.spec = spec
        self._world = world
        self._accumulation = accumulation
        self._weighting = weighting
        self._fresh: dict[nn.Parameter, Tensor] = {}
        self._resting: dict[nn.Parameter, Tensor] = {}
        """Masters that a state_dict has brought of parameters that are frozen for now."""
        self._written: set[int] = set()
        self._hidden: dict[optim.Optimizer, StateOfEngine] = {}
        """By optimizer whose state is with the engine, what stands for it."""
        self._shown: dict[optim.Optimizer, whole_optimizer.Marks] = {}
        """By optimizer whose state user code reads, how it was."""
        self._in_method: optim.Optimizer | None = None
        self.in_ema = False
        """Whether the parameters are averages now, or the anchor of islands."""
        usage_checks.check_embeddings(spec.models, spec.placement, workers=world.data_size)
        # Before anything else is collective: ranks with different models would wait for each
        # other in different places.
        consistency.check_same_model(spec)
        self._distribute(plan)
        try:
            self._prepare_modules()
            precision.widen_narrow_states(spec.optimizers)
            self.buffers = self._all_buffers()
            self._release_other_stages()
            spec.parameter_uses.watch()
            self._build_states({}, None)
        except (ConfigError, ModelError):  # raised by all ranks alike: the model stays plain
            self._reassemble_models()
            raise
        self._handles = self._enter_precision()
        if spec.settings.compile and spec.settings.activations == "kept":
            self._compile_units()
        self.activations = Activations(spec.models, spec.settings, world.device, rank=world.rank)
        self._forwards = ForwardEvents(spec.models, spec.settings.units)
        if spec.pipeline is not None:
            install(spec.pipeline, spec.models[0])
        self.attributes = OptimizerAttributes(spec)
        self._hook_optimizers()

    def _distribute(self, plan: TensorPlan | None) -> None:
        """Give every rank the values of rank 0, of the layers and parts of layers that it has."""
        spec = self.spec
        if spec.pipeline is not None:
            pipeline_parallel.assign_layers(spec, spec.pipeline)
        self._give_memory()
        # While tensors are whole: afterwards ranks have different parts of them.
        consistency.make_state_alike(spec)
        if spec.tensor is not None:
            tensor_parallel.find_and_split(spec, spec.tensor, plan)
        if spec.pipeline is not None:
            spec.pipeline.tensor_parallel = spec.tensor

    def _hook_optimizers(self) -> None:
        """Refuse what the user's optimizers cannot do by themselves any more."""
        callbacks = usage_checks.OptimizerCallbacks(
            WeakMethod(self._prepare_added_group),
            WeakMethod(self.plain_state),
            WeakMethod(self.check_state),
            WeakMethod(self.take_state),
            WeakMethod(self.whole_for_method),
            alone=self._world.size == 1,
        )
        for optimizer in self.spec.optimizers:
            usage_checks.forbid(optimizer, callbacks)

    def _build_states(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
        anchor: Kept | None = None,
    ) -> None:
        """Lay the three states over the models and optimizers.

        `masters`, `averages` and `anchor` are those of an earlier layout, by parameter.
        """
        known = self._fresh | plain_state_dict.thawed(self._resting) | dict(masters)
        self.states = build.build(self.spec, known, averages, anchor)
        self._fresh, self._written = {}, set()
        self._shape = self.spec.shape()
        self._hide_states()
        follow = WeakMethod(self.follow_changes)
        self.spec.unit_hooks.before = lambda: (call := follow()) and call()

    def _rebuild_states(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
        anchor: Kept | None = None,
    ) -> None:
        """Lay the states out again; gradients that are collected in fp32 stay so."""
        wide = self.states.gradients.wide
        self._build_states(masters, averages, anchor)
        if wide:
            self.states.gradients.widen()

    # -- making ready ---------------------------------------------------------------------

    def _give_memory(self) -> None:
        """Give memory and values to what was built without; then rank 0's values to all ranks."""
        initial_values.fill_unrecorded(self.spec.models, self._world.print)
        spec, located = self.spec, self.spec.located()
        real, line = consistency.everything(spec), spec.pipeline
        if line is not None and spec.tensor is None:
            line.ownership.replace_meta()
            here = [named for named in located if line.owns(named.parameter)]
            fresh = [named.parameter for named in here if named.parameter.is_meta]
            initial_values.make_all_real(here, spec.device)
            initial_values.make_alike(fresh, spec.stage_group)
            initial_values.make_alike(fresh, spec.peers)
        elif spec.tensor is not None or not spec.placement.is_sharded("parameters"):
            initial_values.make_all_real(located, spec.device)
            real = consistency.everything(spec)
        initial_values.make_alike(real, spec.world_group)

    def _prepare_modules(self) -> None:
        """Cast parameters, keeping their values for the masters; synchronise BatchNorm."""
        models, settings = self.spec.models, self.spec.settings
        cast = precision.PRESETS[settings.precision].cast
        if cast is not None:
            self._fresh |= precision.cast_models(models, cast)
            precision.widen_states(self.spec.optimizers, cast)
        if settings.sync_batch_norm and self.spec.data_group.size > 1:
            sync_batch_norm.convert(models, self._world.gather_order, self._world.current_batch)

    def _all_buffers(self) -> Buffers:
        """The models' buffers, which are followed over every rebuild of the states."""
        models, group, shards = self.spec.models, self.spec.stage_group, self.spec.micro_shards
        say, compares = self._world.say_once, self._has_whole
        if shards is None:
            alone, synchronised = self._world.size == 1, self._synchronised
            found = Buffers(models, group, synchronised, alone=alone, compares=compares, say=say)
        else:
            found = MicroShardBuffers(models, group, shards, compares=compares, say=say)
        self._world.current_batch.watch(found.before_batch)
        return found

    def _has_whole(self, frozen: nn.Parameter) -> bool:
        """Whether this rank has the whole of a frozen parameter, as the others of its group do."""
        spec = self.spec
        if spec.placement.is_sharded("parameters") or frozen.is_meta:
            return False  # a forward that writes into one of those is refused
        return spec.is_here(frozen) and spec.shard_of(frozen) is None

    def _release_other_stages(self) -> None:
        """Free the layers of other pipeline ranks, and the optimizer state of these."""
        if (line := self.spec.pipeline) is None:
            return
        line.ownership.free_others()
        self._fresh = {p: value for p, value in self._fresh.items() if line.owns(p)}
        for optimizer in self.spec.optimizers:
            for parameter in [p for p in optimizer.state if not line.owns(p)]:
                del optimizer.state[parameter]

    def _reassemble_models(self) -> None:
        """Give every rank the whole model and all of the optimizers' state. Collective."""
        spec = self.spec
        spec.parameter_uses.unwatch()
        shapes: dict[nn.Parameter, tuple[int, ...]] = {}
        if spec.pipeline is not None:
            spec.pipeline.close()
        if spec.tensor is not None:
            shapes = {p: shard.shape for p, shard in spec.tensor.shards.items()}
            spec.tensor.undo(spec.optimizers, spec.is_here)
        if spec.pipeline is not None:
            spec.pipeline.ownership.undo(spec.models[0], spec.optimizers, shapes)

    @property
    def _synchronised(self) -> set[nn.Module]:
        """The modules that keep their buffers in step themselves."""
        return set(sync_batch_norm.converted(self.spec.models))

    def _enter_precision(self) -> list[Hooked]:
        preset = precision.PRESETS[self.spec.settings.precision]
        if preset.cast is None and preset.autocast is None:
            return []
        kind = self.spec.device.type
        models = self.spec.models
        return [h for m in models for h in precision.ForwardPrecision(preset, kind).attach(m)]

    def _compile_units(self) -> None:
        for model in self.spec.models:
            for _, unit in units.find_units(model, self.spec.settings.units) or [("", model)]:
                unit.compile()

    # -- changes on the way ---------------------------------------------------------------

    def _prepare_added_group(self, group: dict[str, Any]) -> None:
        """Prepare a parameter group that was added to the user's optimizer for its first forward.

        Raises UsageError with `--pipeline`: which worker has the new layers is not known.
        """
        if self.spec.pipeline is not None:
            raise UsageError(
                f"add_param_group after sw.Engine(...) with --pipeline "
                f"{self.spec.pipeline.group.size}: which worker has these layers was decided when "
                "the engine was made. Add the group before, or start without --pipeline."
            )
        shown = self.states.shown
        resting = [] if shown is None else shown.residency.resting()
        new = [p for p in group["params"] if not any(p is known for known in resting)]
        # Of what is split each rank of a replica has another part: its twins' values, not rank 0's.
        split = [p for p in new if self.spec.shard_of(p) is not None]
        initial_values.make_alike(
            [p for p in new if self.spec.shard_of(p) is None], self.spec.world_group
        )
        initial_values.make_alike(split, self.spec.data_group)
        initial_values.make_alike(split, self.spec.peers)
        self._prepare_modules()
        self.buffers.meet(self._synchronised)

    def check_passes(self) -> None:
        """Raise for what was wrong in forwards that no step may follow any more: exchanges in
        disorder, on all ranks alike, and writes that reach no shard."""
        self.spec.gather_order.check()
        if self.states.shown is not None:
            self.states.shown.residency.check_passes()

    def look_for_changes(self) -> None:
        """Follow what user code did since the last call: replace, write or add parameters."""
        states = self.states
        states.parameters.check()
        self.take_in_writes()
        is_awaited = states.shown is not None and states.shown.residency.is_awaited
        if is_awaited and not self._shape.fits(self.spec.shape()):
            raise UsageError(
                "Parameter groups or requires_grad changed between a forward and "
                "engine.backward. Change them right after engine.step()."
            )
        self.follow_changes()

    def take_in_writes(self) -> None:
        """Take what user code has written, before an update: optimizer state into the engine's,
        parameters into the masters."""
        self._take_back_states()
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
        consistency.check_written(self.spec, self.states.parameters.named, written)

    def follow_changes(self) -> None:
        """Rebuild the states if parameter groups, requires_grad or optimizer state changed.
        Collective then."""
        # Before a forward too: what it gathers must not be laid out again before its backward.
        self._take_back_states()
        if self._shape.fits(self.spec.shape()):
            return
        if self._accumulation.backwards:
            raise UsageError(
                "Parameter groups or requires_grad changed between engine.backward and "
                "engine.step. Change them right after engine.step()."
            )
        consistency.check_same_model(self.spec)
        self.buffers.meet(self._synchronised)
        self._rebuild_states(*self._taken_apart())

    def _taken_apart(self) -> tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]:
        """What a new layout goes on with, see `build.take_apart`; what has left the optimizers is
        alike on all islands. Collective."""
        masters, averages, anchor = build.take_apart(self.spec, self.states)
        island_states.leave_equal(anchor, self._optimized())
        return masters, averages, anchor

    def _optimized(self) -> set[nn.Parameter]:
        """The parameters that an optimizer has, frozen ones too."""
        groups = [group for o in self.spec.optimizers for group in o.param_groups]
        return {parameter for group in groups for parameter in group["params"]}

    def plain_state(
        self, optimizer: optim.Optimizer, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """The state_dict that `optimizer` would have in one process. Collective."""
        self._take_back_states()
        unit = self._weighting.lasting_unit if for_resume else None
        made = plain_state_dict.make(self.spec, self.states, optimizer, unit, self._resting)
        attributes = self.attributes.plain(optimizer)
        return made | {plain_state_dict.ATTRIBUTES: attributes} if attributes else made

    def check_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Raise, on all ranks alike, unless `optimizer` can go on from `state` now. Collective."""
        if self._accumulation.backwards:
            raise UsageError(
                f"{type(optimizer).__name__}.load_state_dict between engine.backward and "
                "engine.step: load it after the step."
            )
        self.look_for_changes()
        failure = plain_state_dict.misfit(optimizer, state)
        agree(self.spec.world_group, failure, CheckpointMismatch)

    def take_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Let `optimizer` go on from `state`, a plain state_dict that was checked. Collective."""
        # Ranks that go on otherwise than others would wait for each other in different places.
        wide, unit = self.spec.world_group.gather_plain(plain_state_dict.numbers(state))[0]
        masters, averages, anchor = self._taken_apart()
        self._resting |= plain_state_dict.refine(masters, optimizer, state)
        plain_state_dict.give(optimizer, state)
        if (attributes := state.get(plain_state_dict.ATTRIBUTES)) is not None:
            self.attributes.take_plain(optimizer, attributes, self._world.say_once)
        self._rebuild_states(masters, averages, anchor)
        if wide and self.spec.settings.reduce_dtype == "fp32":
            self.states.gradients.widen()
        if unit is not None:
            self._weighting.unit = unit

    # -- the state of optimizers, for user code -----------------------------------------------

    def _hide_states(self) -> None:
        """Let a use of the state of each optimizer that the engine has it of come here."""
        stays = {group.optimizer for group in self.states.optimizer.groups if group.stays}
        for optimizer in self.spec.optimizers:
            state: Any = optimizer.state
            if optimizer not in stays and not isinstance(state, StateOfEngine):
                optimizer.state = self._hidden[optimizer] = StateOfEngine(state)
                self._hidden[optimizer].hide(self._shows_state(optimizer))

    def _shows_state(self, optimizer: optim.Optimizer) -> Callable[[], None]:
        show = WeakMethod(self._show_state)
        return lambda: (call := show()) and call(optimizer)

    def _show_state(self, optimizer: optim.Optimizer) -> None:
        """User code uses `optimizer.state`: let it have a copy until the engine goes on."""
        if self._world.size > 1:
            raise usage_checks.refuse_state(optimizer)
        state = self._hidden[optimizer]
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        gathered = self.states.gathering.optimizer_state()
        state.show({**state.resting, **{p: kept for p, kept in gathered.items() if p in mine}})
        self._shown[optimizer] = whole_optimizer.marks(state)

    def _take_back_states(self) -> None:
        """Take in what user code has changed in the state of its optimizers, or put in its
        place."""
        changed: dict[optim.Optimizer, dict[Any, Any]] = {}
        for optimizer, state in self._hidden.items():
            before = self._shown.pop(optimizer, None)
            if optimizer.state is not state:
                changed[optimizer] = dict(optimizer.state)
            elif before is not None:
                if not whole_optimizer.are_equal(before, whole_optimizer.marks(state)):
                    changed[optimizer] = dict(state)
            else:
                continue
            state.hide(self._shows_state(optimizer))
        if not changed:
            return
        optimizer = next(iter(changed))
        for each in changed:
            each.state = self._hidden[each]
        if self._world.size > 1:
            raise usage_checks.refuse_state(optimizer)
        if self._accumulation.backwards:
            raise UsageError(
                f"The state of {type(optimizer).__name__} changed between engine.backward and "
                "engine.step. Change it right after engine.step()."
            )
        masters, averages, anchor = self._taken_apart()
        for each, content in changed.items():
            self._hidden[each].resting.clear()
            self._hidden[each].resting.update(content)
        self._rebuild_states(masters, averages, anchor)

    def _give_states_back(self) -> None:
        """Let the optimizers have plain mappings as their states."""
        for optimizer, state in self._hidden.items():
            if optimizer.state is state:
                optimizer.state = state.resting  # type: ignore[assignment]
        self._hidden.clear()
        self._shown.clear()

    @contextmanager
    def whole_for_method(self, optimizer: optim.Optimizer, method: str) -> Iterator[None]:
        """Inside the block, `optimizer` has parameters and state whole once its `method` uses
        them. Collective then, unless the state stays with it."""
        in_place = optimizer not in self._hidden and not self.states.optimizer.has_masters
        in_place |= any(inner.is_users_stepping for inner in self.states.optimizer.inners)
        if in_place or self._in_method is not None:
            yield
            return
        self._take_back_states()
        rebuilding = whole_optimizer.Rebuilding(
            self._check_method, self._taken_apart, self._rebuild_states
        )
        self._in_method = optimizer
        try:
            reach = self._shows_state(optimizer)
            with whole_optimizer.whole(optimizer, method, rebuilding, reach):
                yield
        finally:
            self._in_method = None

    def _check_method(self, call: str) -> None:
        """Raise UsageError where the states cannot be taken apart for `call`."""
        shown, settings = self.states.shown, self.spec.settings
        for name, apart in (("tensor", self.spec.tensor), ("pipeline", self.spec.pipeline)):
            if apart is not None:
                raise UsageError(
                    f"{call} uses parameters or their optimizer state, and with --{name} "
                    f"{getattr(settings, name)} a worker has parts of these. Start without "
                    f"--{name}."
                )
        where = None
        if self._accumulation.backwards:
            where = "between engine.backward and engine.step"
        elif self.in_ema:
            where = "inside engine.ema() or anchor()"
        elif shown is not None and shown.residency.in_block:
            where = "inside engine.full_parameters()"
        elif shown is not None and shown.residency.is_awaited:
            where = "between a forward and engine.backward"
        if where is not None:
            raise UsageError(
                f"{call} {where}: it uses parameters or their optimizer state, which the engine "
                "has to take apart for it. Call it right after engine.step()."
            )
        self.look_for_changes()

    def make_room_for_averages(self, names: Set[str]) -> bool:
        """Rebuild the states with averages for those of the parameters `names` that are frozen and
        have none, where averages are kept; returns whether there were any. Collective."""
        if self.states.averages is None:
            return False
        resting = self._optimized()
        resting -= {named.parameter for named in self.states.parameters.named}
        lacking = {
            t.parameter: torch.zeros(()).expand(t.shape)
            for t in self.spec.located()
            if t.parameter in resting and t.name in names and self.spec.is_here(t.parameter)
        }
        if not any(self.spec.world_group.gather_objects(bool(lacking))):
            return False
        masters, averages, anchor = self._taken_apart()
        self._rebuild_states(masters, (averages or {}) | lacking, anchor)
        return True

    def leave_in_child(self) -> None:
        """In a forked child: leave gradients to plain autograd, and sharded parameters at rest."""
        self.states.gradients.detach()
        shown = self.states.shown
        if shown is not None and self.spec.shard_group.size > 1:
            shown.residency.rest_in_child()
            # A forward must not gather: it has the parameters of a block of the user's, or raises.
            self.spec.unit_hooks.remove()

    def end(self) -> None:
        """Give everything back as it was, trained; of islands what they last had in common.
        Collective.

        Raises afterwards as `check_passes`, and where islands have not made as many steps, unless
        this is on the way out of another error.
        """
        fails = sys.exc_info()[0] is not None
        try:
            if not fails:
                self._take_back_states()
                self.check_passes()
                island_states.drop(self.states.delayed)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        island_states.rest_on_anchor(self.states.islands)
        self._give_states_back()
        build.take_apart(self.spec, self.states)
        self._reassemble_models()
        precision.narrow_states(filter(is_torchs, self.spec.optimizers))
        self.spec.leave_groups()
        self.activations.close()
        self.spec.unit_hooks.remove()
        self._forwards.close()
        for handle in self._handles:
            handle.remove()
        sync_batch_norm.restore(self.spec.models)
        for optimizer in self.spec.optimizers:
            usage_checks.allow(optimizer)
