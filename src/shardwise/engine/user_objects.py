"""Prepares the user's models and optimizers, tracks changes to them, and restores them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint.agreement import agree
from shardwise.checkpoint.attribute_values import OptimizerAttributes
from shardwise.engine import (
    build,
    consistency,
    expert_parallel,
    initial_values,
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
from shardwise.layout.bucket_layout import DATA, EXPERT_COPIES
from shardwise.model import precision, sync_batch_norm
from shardwise.model.activations import Activations
from shardwise.model.buffers import Buffers
from shardwise.model.forward_events import ForwardEvents
from shardwise.model.micro_shard_buffers import MicroShardBuffers
from shardwise.model.module_hooks import Hooked
from shardwise.model.optimizer_access import StateOfEngine
from shardwise.parallel.expert.split_experts import find_layers
from shardwise.parallel.pipeline import install
from shardwise.parallel.tensor.plan import TensorPlan
from shardwise.states.optimizer.optimizer_kind import is_torchs
from shardwise.states.second_copies import HeldGather
from shardwise.states.step_hooks import Kept
from shardwise.world.world import World

living: WeakSet[UserObjects] = WeakSet()
"""The user objects of all open engines in this process."""


class WholeStates(NamedTuple):
    """The full states of an engine, by parameter.

    Args:
        optimizer: Each trained parameter's optimizer state.
        masters: The values of trained parameters, in the dtype of their masters.
        frozen: The values of sharded parameters that are not trained.
        averages: The averages of `ema_decay`, or None.
    """

    optimizer: Mapping[nn.Parameter, dict[str, Any]]
    masters: Mapping[nn.Parameter, Tensor]
    frozen: Mapping[nn.Parameter, Tensor]
    averages: Mapping[nn.Parameter, Tensor] | None


class UserObjects:
    """Manages the user's models and optimizers. Owns the engine's states, buffers and activations.

    If parameter groups or requires_grad change between steps, the states are laid out again.
    Creating an instance is collective.

    Args:
        world: The ranks that train together.
        spec: The models, optimizers and process groups.
        accumulation: Shows whether the engine is between two steps.
        weighting: Provides the divisor of loss weights for a plain state_dict.
        plan: The user's plan for tensor parallelism, or None.
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
        """Loaded fp32 masters of parameters that are currently frozen."""
        self._written: set[int] = set()
        """Indices of replicated parameters that user code has written to since the last step."""
        self._hidden: dict[optim.Optimizer, StateOfEngine] = {}
        """Maps optimizers whose state the engine holds to the objects that replace their
        `state`."""
        self._shown: dict[optim.Optimizer, whole_optimizer.Marks] = {}
        """Maps optimizers whose state was copied out for user code to its marks at that time."""
        self._in_method: optim.Optimizer | None = None
        self.in_ema = False
        """True while the parameters hold their averaged (EMA) or anchor values."""
        usage_checks.check_embeddings(spec.models, spec.placement, workers=world.mesh.data)
        # Check this before any other collective: with different models, ranks would deadlock in
        # different collectives.
        consistency.check_same_model(spec)
        self._distribute(plan)
        try:
            self._prepare_modules()
            # Widen before the layout, which keeps the dtypes of optimizer state as they are.
            precision.widen_narrow_states(spec.optimizers)
            self.buffers = self._all_buffers()
            self._release_other_stages()
            # Start watching only now: preparing the model may use parameters in ways that user code
            # must not.
            spec.parameter_uses.watch()
            self._build_states({}, None)
        except (ConfigError, ModelError):
            # All ranks raise these errors together, so they can all restore the model.
            self._reassemble_models()
            raise
        self._handles = self._enter_precision()
        if spec.context is not None:
            spec.context.install()
        for loss in spec.chunked_losses:
            loss.install()
        self.activations = Activations(
            spec.models,
            spec.settings,
            world.device,
            rank=world.rank,
            compiler=tensor_parallel.compiler_of(spec),
        )
        self._forwards = ForwardEvents(spec.models, spec.settings.units)
        if spec.pipeline is not None:
            install(spec.pipeline, spec.models[0])
        self.attributes = OptimizerAttributes(spec)
        self._hook_optimizers()

    def _distribute(self, plan: TensorPlan | None) -> None:
        """Broadcast rank 0's values for this rank's layers, and split the models."""
        spec = self.spec
        if spec.pipeline is not None:
            pipeline_parallel.assign_layers(spec, spec.pipeline)
        self._give_memory()
        # Broadcast before the split, after which ranks have different parts of each tensor.
        consistency.make_state_alike(spec)
        if spec.tensor is not None:
            tensor_parallel.find_and_split(spec, spec.tensor, plan)
        if spec.pipeline is not None:
            spec.pipeline.tensor_parallel = spec.tensor
        if spec.routing is not None:
            expert_parallel.split(spec)

    def _hook_optimizers(self) -> None:
        """Redirect the methods of the user's optimizers to the engine, or make them raise."""
        # Use weak references, because the user's optimizers outlive the engine.
        callbacks = usage_checks.OptimizerCallbacks(
            WeakMethod(self._prepare_added_group),
            WeakMethod(self.plain_state),
            WeakMethod(self.check_state),
            WeakMethod(self.take_state),
            WeakMethod(self.whole_for_method),
            alone=self._world.is_alone,
        )
        for optimizer in self.spec.optimizers:
            usage_checks.forbid(optimizer, callbacks)

    def _build_states(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
        anchor: Kept | None = None,
    ) -> None:
        """Create the engine's states for the models and optimizers. Collective.

        `masters`, `averages` and `anchor` are the values of an earlier layout, keyed by parameter.
        """
        known = self._fresh | plain_state_dict.thawed(self._resting) | dict(masters)
        self.states = build.build(self.spec, known, averages, anchor)
        self._fresh, self._written = {}, set()
        self._shape = self.spec.shape()
        self._hide_states()
        # Use a weak reference: the hooks are on the user's models, which may outlive the engine.
        follow = WeakMethod(self.follow_changes)
        self.spec.unit_hooks.before = lambda: (call := follow()) and call()

    def _rebuild_states(
        self,
        masters: Mapping[nn.Parameter, Tensor],
        averages: Mapping[nn.Parameter, Tensor] | None,
        anchor: Kept | None = None,
    ) -> None:
        """Recreate the states, keeping the dtype of gradient sums. Collective."""
        wide = self.states.gradients.wide
        self._build_states(masters, averages, anchor)
        if wide:
            self.states.gradients.widen()

    # -- preparation ----------------------------------------------------------------------

    def _give_memory(self) -> None:
        """Materialise tensors on the meta device, and broadcast rank 0's values to all ranks."""
        initial_values.fill_unrecorded(self.spec.models, self._world.print)
        spec, located = self.spec, self.spec.located()
        real, line = consistency.everything(spec), spec.pipeline
        # Allocate only this stage's layers. The other layers stay on the meta device.
        if line is not None and spec.tensor is None:
            line.ownership.replace_meta()
            here = [named for named in located if line.owns(named.parameter)]
            fresh = [named.parameter for named in here if named.parameter.is_meta]
            initial_values.make_all_real(here, spec.device)
            initial_values.make_alike(fresh, spec.stage_group)
            initial_values.make_alike(fresh, spec.peers)
        # Tensor parallelism splits full tensors, so they must be allocated first. Without it,
        # sharded parameters stay on the meta device for now, and are materialised one at a time
        # when they are sharded.
        elif spec.shares_whole_tensors or not spec.placement.is_sharded("parameters"):
            initial_values.make_all_real(located, spec.device)
            real = consistency.everything(spec)
        initial_values.make_alike(real, spec.world_group)

    def _prepare_modules(self) -> None:
        """Cast parameters, keep their original values for the masters, and convert BatchNorm."""
        models, settings = self.spec.models, self.spec.settings
        cast = precision.PRESETS[settings.precision].cast
        # Keep the values before the cast as the initial fp32 masters.
        if cast is not None:
            self._fresh |= precision.cast_models(models, cast)
            precision.widen_states(self.spec.optimizers, cast)
        if settings.sync_batch_norm and self.spec.data_group.size > 1:
            sync_batch_norm.convert(models, self._world.gather_order, self._world.current_batch)

    def _all_buffers(self) -> Buffers:
        """Create the object that tracks the models' buffers. It survives rebuilds of the states."""
        models, group, shards = self.spec.models, self.spec.stage_group, self.spec.micro_shards
        say, compares = self._world.say_once, self._has_whole
        if shards is None:
            alone, synchronised = self._world.is_alone, self._synchronised
            buffers = Buffers(models, group, synchronised, alone=alone, compares=compares, say=say)
        else:
            buffers = MicroShardBuffers(models, group, shards, compares=compares, say=say)
        self._world.current_batch.watch(buffers.before_batch)
        return buffers

    def _has_whole(self, frozen: nn.Parameter) -> bool:
        """Return whether all ranks of this pipeline stage hold `frozen` in full."""
        spec = self.spec
        # A forward pass that writes to a sharded parameter raises anyway.
        if spec.placement.is_sharded("parameters") or frozen.is_meta:
            return False
        # A rank without the values cannot sum their bits.
        if frozen in spec.quantised_weights:
            return False
        return spec.is_here(frozen) and spec.shard_of(frozen) is None

    def _release_other_stages(self) -> None:
        """Free the layers of other pipeline stages, and their optimizer state."""
        if (line := self.spec.pipeline) is None:
            return
        line.ownership.free_other_parameters()
        self._fresh = {p: value for p, value in self._fresh.items() if line.owns(p)}
        for optimizer in self.spec.optimizers:
            for parameter in [p for p in optimizer.state if not line.owns(p)]:
                del optimizer.state[parameter]

    def _reassemble_models(self) -> None:
        """Restore the full model and all optimizer state on every rank. Collective."""
        spec = self.spec
        spec.parameter_uses.unwatch()
        shapes = {
            p: shard.shape
            for splits in (spec.tensor, spec.experts)
            if splits is not None
            for p, shard in splits.shards.items()
        }
        if spec.pipeline is not None:
            spec.pipeline.close()
        if spec.tensor is not None:
            spec.tensor.undo(spec.optimizers, spec.is_here)
        expert_parallel.restore(spec)
        if spec.pipeline is not None:
            spec.pipeline.ownership.undo(spec.models[0], spec.optimizers, shapes)

    @property
    def _synchronised(self) -> set[nn.Module]:
        """The modules that synchronise their own buffers."""
        # Layers with experts change their bias in the step, identically on all ranks.
        routed = (layer for _, layer in find_layers(self.spec.models))
        return {*sync_batch_norm.converted(self.spec.models), *routed}

    def _enter_precision(self) -> list[Hooked]:
        preset = precision.PRESETS[self.spec.settings.precision]
        if preset.cast is None and preset.autocast is None:
            return []
        kind = self.spec.device.type
        models = self.spec.models
        return [h for m in models for h in precision.ForwardPrecision(preset, kind).attach(m)]

    # -- changes by user code -------------------------------------------------------------

    def _prepare_added_group(self, group: dict[str, Any]) -> None:
        """Prepare a parameter group that was added to the user's optimizer. Collective.

        Raises UsageError with `--pipeline`, because the stage of new layers is unknown.
        """
        if self.spec.pipeline is not None:
            raise UsageError(
                f"add_param_group after sw.Engine(...) with --pipeline "
                f"{self.spec.pipeline.group.size}: the engine assigned layers to workers when it "
                "was created. Add the group before, or start without --pipeline."
            )
        shown = self.states.shown
        resting = [] if shown is None else shown.residency.resting()
        new = [p for p in group["params"] if not any(p is known for known in resting)]
        # Ranks of a replica have different parts of a split parameter, so each copies the
        # corresponding part from the first replica, not rank 0's part.
        split = [p for p in new if self.spec.shard_of(p) is not None]
        initial_values.make_alike(
            [p for p in new if self.spec.shard_of(p) is None], self.spec.world_group
        )
        groups = {DATA: self.spec.data_group, EXPERT_COPIES: self._world.expert_copies}
        for axis, copies in groups.items():
            initial_values.make_alike([p for p in split if self.spec.axis_of(p) == axis], copies)
        initial_values.make_alike(split, self.spec.peers)
        self._prepare_modules()
        self.buffers.meet(self._synchronised)

    def check_passes(self) -> None:
        """Raise errors of earlier forward passes that no step would report.

        Such errors are gathers in different orders, raised on all ranks, and writes that reach no
        shard.
        """
        self.spec.gather_order.check()
        if self.states.shown is not None:
            self.states.shown.residency.check_passes()

    def look_for_changes(self) -> None:
        """Apply changes that user code made: parameters that were replaced, written to or added."""
        states = self.states
        states.parameters.check()
        self.take_in_writes()
        # Handle writes first: a new layout would start from the masters and lose the writes.
        is_awaited = states.shown is not None and states.shown.residency.is_awaited
        # A forward pass has gathered units for its backward pass. A new layout would lose them.
        if is_awaited and not self._shape.fits(self.spec.shape()):
            raise UsageError(
                "Parameter groups or requires_grad changed between a forward and "
                "engine.backward. Change them right after engine.step()."
            )
        self.follow_changes()

    def take_in_writes(self) -> None:
        """Apply user code's writes to parameters and optimizer state."""
        self._take_back_states()
        states = self.states
        # Sharded parameters have no copy on another rank that could differ.
        sharded = self.spec.placement.is_sharded("parameters")
        alone = sharded or self._world.size == 1
        if alone and not states.optimizer.has_masters:
            return
        if written := states.parameters.written():
            if states.optimizer.has_masters:
                states.optimizer.refresh_masters(written)
            if not alone:  # the step's exchange compares them across ranks
                self._written |= written
                if states.copies is not None:
                    states.copies.take_in_writes(written)
            states.parameters.remember()

    @property
    def has_written(self) -> bool:
        """True if user code has written to replicated parameters since the last check."""
        return bool(self._written)

    def check_written(self) -> None:
        """Raise ModelMismatch if user code has written different values on some ranks.

        Collective.
        """
        written, self._written = self._written, set()
        consistency.check_written(self.spec, self.states.parameters.named, written)

    def follow_changes(self) -> None:
        """Rebuild the states if parameter groups, requires_grad or optimizer state have changed.

        Collective if any of them has changed.
        """
        # This also runs before a forward pass, because the layout must not change before its
        # backward pass.
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
        self._rebuild_states(*self._take_apart())

    def _take_apart(self) -> tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]:
        """Dismantle the states. Return masters, averages and anchor for a new layout. Collective.

        With islands, a parameter that was removed from the optimizers gets the value that the
        islands last agreed on.
        """
        masters, averages, anchor = build.take_apart(self.spec, self.states)
        if self.spec.hooks is not None:
            self.spec.hooks.write_common_values(anchor, self._optimized())
        return masters, averages, anchor

    def renew_copies(self) -> None:
        """After a load, rebuild the states if ranks hold second copies. Collective."""
        if self.states.copies is not None:
            self._rebuild_states(*self._take_apart())

    def gather_from_left(self) -> WholeStates:
        """Gather the full states after ranks were lost. Collective.

        Raises CollectiveError if a rank and the holder of its second copies are both lost.
        """
        states = self.states
        sharded = self.spec.placement.is_sharded("parameters")
        # The copies would otherwise lack what user code has written since the last step.
        if not sharded and (written := states.parameters.written()):
            states.optimizer.refresh_masters(written)
            if states.copies is not None:
                states.copies.take_in_writes(written)
        # Nothing is released before every rank has gathered all states.
        return self.spec.world_group.steadily(self.gather_whole)

    def gather_whole(self) -> WholeStates:
        """Gather the full states of all ranks. The states stay as they are. Collective.

        Raises CollectiveError if a rank and the holder of its second copies are both lost.
        """
        states = self.states
        held = HeldGather(
            states.parameters, states.optimizer, states.copies, self.spec.shard_groups
        )
        averages = states.averages
        return WholeStates(
            held.optimizer_state(),
            held.masters(),
            held.frozen(),
            None if averages is None else states.gathering.tensors(averages.loaded()),
        )

    def lay_out(self, whole: WholeStates) -> None:
        """Recreate the states from `whole`, which is the same on all ranks. Collective."""
        # Replicated parameters may hold values of two steps, if the all-gather was interrupted.
        values = {**whole.masters, **whole.frozen}
        build.give_back(self.spec, self.states, whole.optimizer, values)
        self._rebuild_states(whole.masters, whole.averages)

    def _optimized(self) -> set[nn.Parameter]:
        """Return the parameters in all optimizers, including frozen ones."""
        groups = [group for o in self.spec.optimizers for group in o.param_groups]
        return {parameter for group in groups for parameter in group["params"]}

    def plain_state(
        self, optimizer: optim.Optimizer, *, for_resume: bool = False
    ) -> dict[str, Any]:
        """Return the state_dict that `optimizer` would have in a single process. Collective."""
        self._take_back_states()
        unit = self._weighting.lasting_unit if for_resume else None
        plain = plain_state_dict.make(self.spec, self.states, optimizer, unit, self._resting)
        attributes = self.attributes.plain(optimizer)
        return plain | {plain_state_dict.ATTRIBUTES: attributes} if attributes else plain

    def check_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Raise on all ranks if `optimizer` cannot load `state` now. Collective."""
        if self._accumulation.backwards:
            raise UsageError(
                f"{type(optimizer).__name__}.load_state_dict between engine.backward and "
                "engine.step: load it after the step."
            )
        self.look_for_changes()
        failure = plain_state_dict.misfit(optimizer, state)
        agree(self.spec.world_group, failure, CheckpointMismatch)

    def take_state(self, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load `state`, which `check_state` has accepted, into `optimizer`. Collective."""
        # Use rank 0's numbers on all ranks: a different unit would change results, and a different
        # gradient dtype would change the collectives.
        wide, unit = self.spec.world_group.gather_plain(plain_state_dict.numbers(state))[0]
        masters, averages, anchor = self._take_apart()
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
        """Replace each `optimizer.state` that the engine holds, to detect when it is used."""
        stays = {group.optimizer for group in self.states.optimizer.groups if group.stays}
        for optimizer in self.spec.optimizers:
            state: Any = optimizer.state
            if optimizer not in stays and not isinstance(state, StateOfEngine):
                optimizer.state = self._hidden[optimizer] = StateOfEngine(state)
                # From now on the engine serves reads of `state`, and detects what user code writes
                # to it.
                self._hidden[optimizer].hide(self._shows_state(optimizer))

    def _shows_state(self, optimizer: optim.Optimizer) -> Callable[[], None]:
        show = WeakMethod(self._show_state)
        return lambda: (call := show()) and call(optimizer)

    def _show_state(self, optimizer: optim.Optimizer) -> None:
        """Fill `optimizer.state` with a copy of the state, because user code is using it."""
        if self._world.size > 1:
            raise usage_checks.refuse_state(optimizer)
        state = self._hidden[optimizer]
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        gathered = self.states.gathering.optimizer_state()
        state.show({**state.resting, **{p: kept for p, kept in gathered.items() if p in mine}})
        self._shown[optimizer] = whole_optimizer.marks(state)

    def _take_back_states(self) -> None:
        """Apply changes that user code made to `optimizer.state`, even if it was replaced."""
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
        masters, averages, anchor = self._take_apart()
        for each, content in changed.items():
            self._hidden[each].resting.clear()
            self._hidden[each].resting.update(content)
        self._rebuild_states(masters, averages, anchor)

    @contextmanager
    def whole_for_method(self, optimizer: optim.Optimizer, method: str) -> Iterator[None]:
        """Context manager that gives `optimizer` full parameters and state if `method` uses them.

        Collective if the method uses them. Does nothing if the optimizer already holds them.
        """
        in_place = optimizer not in self._hidden and not self.states.optimizer.has_masters
        in_place |= any(inner.is_users_stepping for inner in self.states.optimizer.inners)
        if in_place or self._in_method is not None:
            yield
            return
        self._take_back_states()
        rebuilding = whole_optimizer.Rebuilding(
            self._check_method, self._take_apart, self._rebuild_states
        )
        # The method may call other methods of the optimizer: everything is already gathered then.
        self._in_method = optimizer
        try:
            reach = self._shows_state(optimizer)
            with whole_optimizer.whole(optimizer, method, rebuilding, reach):
                yield
        finally:
            self._in_method = None

    def _check_method(self, call: str) -> None:
        """Raise UsageError if `call` needs full states and they cannot be provided now."""
        shown, settings = self.states.shown, self.spec.settings
        spec = self.spec
        axes = {"tensor": spec.tensor, "pipeline": spec.pipeline, "expert": spec.experts}
        for name, splits in axes.items():
            if splits is not None:
                raise UsageError(
                    f"{call} uses parameters or their optimizer state, but with --{name} "
                    f"{getattr(settings, name)} each worker has only a part of them. Start "
                    f"without --{name}."
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
                f"{call} {where}: the call uses parameters or their optimizer state, and the "
                "engine cannot make them available at this point. Call it right after "
                "engine.step()."
            )
        self.look_for_changes()

    def make_room_for_averages(self, names: Set[str]) -> bool:
        """Add averages for the frozen parameters in `names` that have none, and rebuild the states.

        Returns whether any were added. Does nothing without `ema_decay`. Collective.
        """
        if self.states.averages is None:
            return False
        resting = self._optimized()
        resting -= {named.parameter for named in self.states.parameters.named}
        # Use expanded scalars: only the shape matters, and no memory is used until the state is
        # built.
        lacking = {
            t.parameter: torch.zeros(()).expand(t.shape)
            for t in self.spec.located()
            if t.parameter in resting and t.name in names and self.spec.is_here(t.parameter)
        }
        if not any(self.spec.world_group.gather_objects(bool(lacking))):
            return False
        masters, averages, anchor = self._take_apart()
        self._rebuild_states(masters, (averages or {}) | lacking, anchor)
        return True

    def leave_in_child(self) -> None:
        """In a forked child, leave gradients to plain autograd and release sharded parameters."""
        self.states.gradients.detach()
        shown = self.states.shown
        if shown is not None and self.spec.shard_group.size > 1:
            shown.residency.reshard_in_child()
            # A forward pass in the child must not gather. It uses parameters that the user has
            # gathered, or raises.
            self.spec.unit_hooks.remove()

    def end(self) -> None:
        """Return the trained models and optimizers to the user. Collective.

        With islands, the weights are those that the islands last agreed on. Unless an exception is
        already being handled, this then raises the errors of `check_passes`, and an error if
        islands have taken different numbers of steps.
        """
        fails = sys.exc_info()[0] is not None
        try:
            # After another error, ranks may be at different points, and a collective would hang.
            if not fails:
                self._take_back_states()
                self.check_passes()
                if self.spec.hooks is not None:
                    self.spec.hooks.finish()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self.spec.context is not None:
            self.spec.context.uninstall()
        for loss in self.spec.chunked_losses:
            loss.uninstall()
        if self.spec.hooks is not None:
            self.spec.hooks.restore_common_weights()
        for optimizer, state in self._hidden.items():
            if optimizer.state is state:
                optimizer.state = state.resting  # type: ignore[assignment]
        self._hidden.clear()
        self._shown.clear()
        build.take_apart(self.spec, self.states)
        self._reassemble_models()
        # Once the models are reassembled, undo the rest in the reverse order of `__init__`.
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
