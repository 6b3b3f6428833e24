"""Runs backward passes and steps that can be repeated after a rank is lost, with `--survive`.

A step ends in two small collectives. After the first, the exchange, a rank knows all totals. After
the second, the confirmation, it knows that every rank has them. Only then does it update. If a rank
is lost, the remaining ranks agree on whether to complete the step (comm/survivors/membership.py):

    no remaining rank has confirmed    nothing has changed: discard the gradients, and repeat
    at least one has confirmed         all know the totals: complete the step with them

If the optimizer state is sharded, every rank also holds a second copy of another rank's state
(states/second_copies.py). Before a rank confirms, it sends its reduced gradients to the rank that
holds the copy of its state. That rank applies the same update to the copy. After a rank is lost,
the states are laid out again for the remaining ranks: at once if the step is repeated, otherwise
after the update. The update's all-gather is then skipped.
"""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.comm import Handle
from shardwise.engine.backward import BackwardRunner
from shardwise.engine.engine_state import EngineState
from shardwise.engine.random_state import RandomState
from shardwise.engine.step import StepRunner
from shardwise.engine.user_objects import WholeStates
from shardwise.errors import PeerLost, UsageError
from shardwise.model.buffers import version_of, write
from shardwise.states.second_copies import SecondCopies
from shardwise.states.step_totals import StepStats, StepTotals
from shardwise.timeline import span
from shardwise.world.survival import Survival


class RepeatableBackward(BackwardRunner):
    """Runs backward passes, and records the loss of a rank instead of raising PeerLost.

    The step will then be repeated, so its remaining backward passes do nothing.
    """

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """See Engine.backward."""
        survival = _survival(self._state)
        if survival.loss is None:
            with survival.noticing():
                super().backward(loss, **keywords)

    def forward_backward(
        self, loss_of: Callable[..., Tensor], batch: Any, **keywords: Any
    ) -> Tensor:
        """See Engine.forward_backward. Returns NaN if a rank was lost in this step."""
        survival = _survival(self._state)
        if survival.loss is None:
            with survival.noticing():
                return super().forward_backward(loss_of, batch, **keywords)
        return torch.tensor(math.nan, dtype=torch.float64)


class RepeatableSteps(StepRunner):
    """Runs each step in two phases: all ranks confirm it, then they update.

    If at least one rank has confirmed a step, the step is completed even if a rank is lost.

    Args:
        state: See StepRunner.
        backward: See StepRunner.
        randoms: See StepRunner.
        checkpoints: See StepRunner. If a plain loop repeats a step, the objects tracked here are
            restored to their state at the start of the step.
        *others: See StepRunner.
    """

    def __init__(
        self,
        state: EngineState,
        backward: BackwardRunner,
        randoms: RandomState,
        checkpoints: Checkpoints,
        *others: Any,
    ) -> None:
        super().__init__(state, backward, randoms, checkpoints, *others)
        self._survival = _survival(state)
        self._start = _StepStart(state, checkpoints)
        self._is_layout_due = False
        """True from the loss of a rank until the states are laid out for the remaining ranks."""
        self._is_laying_out = False
        self._whole: WholeStates | None = None
        """The full states, if all ranks hold them, until they are laid out."""
        self._has_confirmed = False
        """True if this rank has confirmed the current step, and lost no rank in it before."""
        self._leaving: tuple[int, ...] = ()
        """Ranks that leave the run after the current step, because of a signal."""
        self._survival.follow = self._follow_group
        self._survival.lay_out = self._lay_out
        self._survival.confirm = self._confirm
        self._survival.remember = self._start.remember
        self._survival.return_tracked = self._start.return_tracked

    def step(self, max_norm: float | None, closure: Callable[[], Any] | None) -> StepStats:
        """See Engine.step."""
        if closure is not None:
            raise UsageError(
                "engine.step(closure=...) with --survive: a closure that is interrupted by a loss "
                "cannot be repeated. Call engine.backward before engine.step(), or start without "
                "--survive."
            )
        if self._is_pending and self._state.totals is None:
            self._survival.check_loop()
            if self._ended_by_loss():
                self._survival.repeat_later()
                return StepStats(math.nan, 0.0, 0.0, skipped=True, repeated=True)
        stats = super().step(max_norm, None)
        self._lay_out()  # if a step is skipped, there was no update after which it was done
        self._start.keep_buffers()
        if self._leaving:
            self._part()
        return stats

    def _part(self) -> None:
        """Leave the run if this rank is in `_leaving`. Otherwise continue without those ranks.

        Collective.
        """
        survival, leaving, self._leaving = self._survival, self._leaving, ()
        if self._world.collectives.status_server.rank in leaving:
            self._world.preemption.leave_alone(self._state.steps)
        survival.replace_group(self._state.steps, is_updated=True)
        self._lay_out()

    def reduce(self) -> float:
        """See Engine.reduce."""
        raise _mid_step("engine.reduce()")

    def full_gradients(self) -> Any:
        """See Engine.full_gradients."""
        raise _mid_step("engine.full_gradients()")

    @property
    def _is_pending(self) -> bool:
        return self._survival.loss is not None or self._accumulation.backwards > 0

    def _confirm(self, plain: bool) -> bool:
        """Reduce and confirm the pending step, if any. Return whether it must be repeated."""
        if not self._is_pending:
            return False
        # A rank lost in the forward pass may make the script skip the rest of its loop's body.
        if plain and self._survival.loss is None:
            raise UsageError(
                "With --survive, a plain loop over a Loader calls engine.step() for every batch. "
                "To accumulate gradients, write: for step in loader.steps(): for x, y in step: "
                "engine.backward(...), then engine.step() once."
            )
        return self._ended_by_loss()

    def _ended_by_loss(self) -> bool:
        """Reduce and confirm the step. Return True if it must be repeated because a rank was lost.

        Collective.
        """
        survival = self._survival
        try:
            if survival.loss is not None:
                raise survival.loss
            with survival.strictly():
                totals = self._reduced("engine.step()")
                states = self._state.states
                if states.copies is not None:
                    states.copies.receive(states.gradients.buckets)
                leaving = survival.group.confirm(leaves=self._world.preemption.leaves_alone)
            survival.in_step = False
            if survival.group.awaits_more(leaving):
                pass  # they ask again in the next step
            elif survival.group.allows(leaving):
                self._leaving = leaving
            else:  # the run stops: a scheduler has sent the signal to all of its processes
                self._state.totals = replace(totals, asked=signal.SIGTERM)
        except PeerLost:
            pass
        else:
            self._has_confirmed = True
            return False
        # Not inside `except`: the error's frames hold messages in flight, and with them the sockets
        # whose end tells the other ranks that this one waits for them elsewhere.
        return self._continue_with_the_others()

    def _continue_with_the_others(self) -> bool:
        """Form a group of the remaining ranks. Return whether the step must be repeated.

        Collective.
        """
        self._has_confirmed = False
        if self._survival.replace_group(self._state.steps + 1):
            self._survival.in_step = False
            return False
        self._backward.abandon()
        self._lay_out()
        self._start.go_back()
        self._randoms.reseed()
        return True

    def _follow_group(self, *, rebuilds: bool = False) -> None:
        """Update this rank's number after its group has changed.

        Also forget pending calls with the lost ranks. `rebuilds` is True if the full states are
        laid out next.
        """
        state, group = self._state, self._survival.group
        state.states.gradients.forget_calls()
        self._backward.reset_stages()
        if group.surplus:  # they leave first
            self._is_layout_due = True
            return
        mesh = self._world.mesh
        state.aggregation.follow(mesh.data_of(self._world.rank), mesh.data)
        if rebuilds:
            pass
        elif state.states.copies is None and self._spec.settings.exact is None:
            state.states.gradients.follow_group()
        else:  # in exact mode, sums over the remaining ranks have other levels
            self._is_layout_due = True
        if not self._is_pending:
            self._randoms.reseed()

    def _lay_out(self, whole: WholeStates | None = None) -> None:
        """If ranks were lost since the last layout, lay the states out again. Collective.

        If all ranks hold the full states in `whole`, for example because spares join, lay them out.
        """
        if whole is not None:
            self._whole, self._is_layout_due = whole, True
        # If further ranks are lost during the gather, the group calls this again, and then repeats
        # the gather with the same states.
        if not self._is_layout_due or self._is_laying_out:
            return
        self._is_laying_out = True
        with self._survival.strictly():
            self._lay_out_now()
        self._is_layout_due = self._is_laying_out = False
        self._survival.loss = None

    def _lay_out_now(self) -> None:
        if self._accumulation.backwards:
            self._backward.abandon()
        if (copies := self._objects.states.copies) is not None:
            with torch.no_grad():
                copies.restore()
        # If further ranks are lost from now on, the states in `_whole` are laid out nevertheless,
        # because spares have no others.
        joins = self._whole is not None
        self._whole = self._whole or self._objects.gather_from_left()
        self._let_surplus_leave()
        self._objects.lay_out(self._whole)
        self._whole = None
        if joins:
            self._start.keep_buffers()

    def _let_surplus_leave(self) -> None:
        """Leave if this rank cannot train with the others. Otherwise continue without such ranks.

        Collective. All ranks hold the full states.
        """
        group = self._survival.group
        while surplus := group.surplus:
            if group.members[group.rank] in surplus:
                reason = f"{group.divisions.reason} cannot use it"
                self._world.preemption.leave_alone(self._state.steps, reason)
            group.replace()
            self._follow_group(rebuilds=True)
            self._survival.announce_left(surplus)

    def _update(self, totals: StepTotals, factor: float | None) -> None:
        """Update this rank's optimizer state, and the second copy that it holds.

        Losing a rank no longer changes the result.
        """
        copies = self._objects.states.copies
        if copies is None or factor is None:
            loss = None
            try:
                super()._update(totals, factor)
            except PeerLost as error:
                loss = error
            if loss is not None:
                # States are sharded without second copies only if no rank may be lost, for example
                # in the last group that holds all experts. So this raises an error that says so.
                self._survival.replace_group(self._state.steps + 1, is_updated=True)
                raise loss
            self._wait_for_updates([])
        else:
            self._update_with_copies(copies, totals, factor)

    def _update_with_copies(self, copies: SecondCopies, totals: StepTotals, factor: float) -> None:
        """Update each bucket, and its second copy of another rank's state."""
        states, survival = self._objects.states, self._survival
        gathers: list[Handle] = []
        with self._backward.abandoning(), span("update"), torch.no_grad():
            states.parameters.begin_update()
            # Each bucket is published only after both updates, because the all-gather of some
            # transports also writes to the interval that the copy updates.
            for index, inner in enumerate(states.optimizer.inners):
                inner.step(totals.used, factor)
                copies.update(index, totals.used, factor)
                if survival.loss is None and not self._is_layout_due:
                    with survival.noticing():
                        gathers += [
                            states.parameters.publish(number, copies.held_rank(number))
                            for number in inner.buckets
                        ]
            states.optimizer.write_back_options()
        self._wait_for_updates(gathers)
        with survival.noticing():
            self._objects.states.parameters.settle()

    def _wait_for_updates(self, gathers: Sequence[Handle]) -> None:
        """Wait until all ranks have updated, or continue on the remaining ranks. Collective.

        `gathers` are the pending all-gathers of the updated parameters, if there are any.
        """
        survival = self._survival
        with span("publish"), survival.noticing():
            if survival.loss is None:
                for handle in gathers:
                    handle.wait()
                for handle in gathers:
                    handle.reusable()
                if self._has_confirmed and not (gathers and self._gathers_span_all()):
                    # Some ranks cannot have noticed a loss in the update. The next collective may
                    # be part of an evaluation, which cannot be repeated. Ranks that have already
                    # connected to the remaining ones skip this, as the others have updated before.
                    survival.group.barrier()
        # The ranks that stay may already have closed their connections to one that leaves.
        if self._leaving:
            survival.loss = None
        elif survival.loss is not None:
            survival.replace_group(self._state.steps + 1, is_updated=True)
        elif not self._is_layout_due and (copies := self._objects.states.copies) is not None:
            copies.published()
        self._lay_out()

    def _gathers_span_all(self) -> bool:
        """Return whether all ranks together gather a bucket after the update.

        With `--tensor` and `--pipeline`, only the ranks with the same part of the model do.
        """
        if self._spec.placement.is_sharded("parameters"):
            return False
        groups, buckets = self._spec.shard_groups, self._objects.states.parameters.buckets
        return any(groups.of(bucket).size == self._survival.group.size for bucket in buckets)


class _StepStart:
    """Restores values that a step may change before it is confirmed.

    These are buffers, tracked objects and the optimizers' options.
    """

    def __init__(self, state: EngineState, checkpoints: Checkpoints) -> None:
        self._state = state
        self._checkpoints = checkpoints
        self._buffers: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        self._tracked: list[tuple[Any, Any]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._agreed = state.buffers.agreed()
        self._calls = state.world.calls.kept()
        self._unit = state.weighting.unit
        self.keep_buffers()

    # -- buffers ------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """Copy the models' buffers that have changed since the last call."""
        kept: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        for number, model in enumerate(self._state.spec.models):
            for name, buffer in model.named_buffers():
                before = self._buffers.get((number, name))
                version = version_of(buffer)
                if before is not None and before[0] is buffer and before[1] == version:
                    kept[number, name] = before
                else:
                    kept[number, name] = buffer, version, buffer.detach().clone()
        self._buffers = kept

    def go_back(self) -> None:
        """Restore the buffers, because the step's forward passes will run again.

        Also drop any agreements that the interrupted step has made with other ranks.
        """
        with torch.no_grad():
            for buffer, version, copied in self._buffers.values():
                if version_of(buffer) != version:
                    write(buffer, copied)
        self.keep_buffers()
        self._state.buffers.go_back(self._agreed)
        self._state.world.calls.go_back(self._calls)
        # If no rank had a unit at the start of the step, only some ranks may have one now. The next
        # backward pass is collective on ranks without one, so all ranks return to the same value.
        self._state.weighting.unit = self._unit

    # -- tracked objects, in a plain loop -----------------------------------------------------

    def remember(self, *, plain: bool) -> None:
        """Store the values at the start of a step.

        The body of a `plain` loop may change tracked objects and the optimizers' options after a
        step that is later repeated. If `plain` is true, they are therefore stored too.

        Raises UsageError if a plain loop uses a learning-rate scheduler that is not tracked.
        """
        # A load, or the script between two steps, may have written to them.
        self.keep_buffers()
        self._agreed = self._state.buffers.agreed()
        self._calls = self._state.world.calls.kept()
        self._unit = self._state.weighting.unit
        if not plain:
            return
        optimizers = self._state.spec.optimizers
        for optimizer in optimizers:
            if self._checkpoints.tracked.lacks_scheduler(optimizer):
                raise UsageError(
                    f"A learning-rate scheduler of {type(optimizer).__name__} is not tracked, so "
                    "--survive cannot return it to the start of a repeated step. Write "
                    "engine.track(scheduler=scheduler), or for step in loader.steps(): for x, y "
                    "in step: ..., which needs no return."
                )
        objects = self._checkpoints.tracked.except_loaders()
        self._tracked = [(each, copy.deepcopy(each.state_dict())) for each in objects]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._options = [
            (group, {k: v for k, v in group.items() if k != "params"}) for group in groups
        ]

    def return_tracked(self) -> None:
        """Restore tracked objects and options after the loop's body has changed them."""
        for each, state in self._tracked:
            each.load_state_dict(state)
        for group, options in self._options:
            group.update(options)


def _survival(state: EngineState) -> Survival:
    assert state.world.survival is not None
    return state.world.survival


def _mid_step(call: str) -> UsageError:
    return UsageError(
        f"{call} with --survive: after a loss, what the script did with the result could not be "
        "undone. Leave the call out, or start without --survive."
    )
