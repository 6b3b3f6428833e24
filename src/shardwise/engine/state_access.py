"""Provides full parameters, averages and plain optimizer state to the user between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from typing import Any

from torch import nn, optim

from shardwise.engine import plain_state_dict, whole_tensors
from shardwise.engine.engine_state import EngineState
from shardwise.engine.user_objects import living
from shardwise.errors import CollectiveError, PeerLost, UsageError


class StateAccess:
    """The engine's context managers and methods that provide full tensors."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        state.world.current_batch.allow_uneven(self._while_some_sit_out)

    @contextmanager
    def full_parameters(self, module: nn.Module | None, *, write: bool) -> Iterator[None]:
        """See Engine.full_parameters."""
        state = self._state
        if write and state.accumulation.backwards and state.spec.pipeline is not None:
            raise UsageError(
                "full_parameters(write=True) between engine.backward and engine.step is not "
                "supported with --pipeline: enter it before the backward or after the step."
            )
        if write and state.in_ema:
            raise UsageError(
                "full_parameters(write=True) inside engine.ema() or anchor(): leaving that block "
                "would undo the writes. Write before or after it."
            )
        self._notice_losses(write=write)
        with self._ending_after_loss(write=write):
            with (
                self._on_whole_sequences(),
                whole_tensors.full_parameters(state.spec, state.states, module, write=write),
            ):
                yield
            if write and state.states.shown is not None and state.states.copies is not None:
                state.states.copies.renew(state.states.optimizer)

    def _notice_losses(self, *, write: bool) -> None:
        """With `--survive`, continue on the remaining ranks if some were lost since the last step.

        Otherwise a block of `full_parameters` would be the first to notice, and end the run. A
        block that only reads replicated parameters runs no collective, and cannot notice.
        """
        spec, shown = self._state.spec, self._state.states.shown
        in_block = spec.is_whole or (shown is not None and shown.residency.in_block)
        is_split = any(split is not None for split in (spec.tensor, spec.pipeline, spec.experts))
        is_collective = write or shown is not None or is_split
        survival = self._state.world.survival
        if survival is not None and not survival.in_step and not in_block and is_collective:
            spec.world_group.steadily(lambda: None)

    @contextmanager
    def _ending_after_loss(self, *, write: bool) -> Iterator[None]:
        """With `--survive`, raise an error that names the block if a rank is lost in it."""
        try:
            yield
        except PeerLost as error:
            if self._state.world.survival is None:
                raise
            call = f"engine.full_parameters({'write=True' if write else ''})"
            reason = "its writes may have reached only some of the workers"
            if not write:
                reason = "the full parameters were not complete on all workers"
            raise CollectiveError(
                f"A worker was lost in {call}, and --survive cannot repeat the block: {reason}. "
                "Start again from the last checkpoint; with --restarts the launcher does so."
            ) from error

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """See Engine.uneven."""
        state = self._state
        if state.spec.pipeline is not None:
            raise UsageError(
                "engine.uneven() with --pipeline: no worker has all layers, so none can run a "
                "forward alone. To run one, write: with engine.full_parameters()."
            )
        if state.spec.experts is not None:
            raise UsageError(
                "engine.uneven() with --expert: no worker has all experts, so none can run a "
                "forward alone. To run one, write: with engine.full_parameters()."
            )
        shown = state.states.shown
        gathers = nullcontext() if shown is None else shown.residency.uneven()
        with self._on_whole_sequences(), gathers:
            state.in_uneven = True
            try:
                yield
            finally:
                state.in_uneven = False

    def _on_whole_sequences(self) -> AbstractContextManager[None]:
        """Return a context manager in which `--context` does not split sequences."""
        context = self._state.spec.context
        return nullcontext() if context is None else context.whole_sequences()

    def _while_some_sit_out(self) -> AbstractContextManager[None]:
        """Return a context manager for an evaluation batch that some ranks skip.

        During the batch, those ranks only participate in the other ranks' gathers.
        """
        state = self._state
        shown = state.states.shown
        # `current_batch` holds this method weakly, but a closed engine may still be referenced.
        closed = state.objects not in living
        if closed or state.in_uneven or shown is None or not shown.residency.is_collective:
            return nullcontext()
        return shown.residency.uneven()

    @contextmanager
    def ema(self) -> Iterator[None]:
        """See Engine.ema."""
        state = self._state
        if state.states.averages is None:
            raise UsageError(
                "engine.ema() needs a moving average: set --ema-decay 0.999 or ema_decay=0.999."
            )
        self._check_enters("ema")
        state.objects.look_for_changes()
        with state.other_weights(state.states.averages.swapped_in()):
            yield

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """See Engine.anchor."""
        state = self._state
        hooks = state.states.hooks
        if hooks is None or not hooks.have_own_weights or state.in_ema:
            yield  # the parameters already hold the common weights
            return
        self._check_enters("anchor")
        state.objects.look_for_changes()
        with state.anchored():
            yield

    def _check_enters(self, block: str) -> None:
        """Raise UsageError if parameters cannot be swapped now: in a step, or while gathered."""
        state = self._state
        if state.accumulation.backwards:
            raise UsageError(
                f"engine.{block}() between engine.backward and engine.step: enter it after the "
                "step."
            )
        if state.states.shown is not None and state.states.shown.residency.in_block:
            raise UsageError(
                f"engine.{block}() inside engine.full_parameters(): parameters are already "
                f"gathered, and would keep their values. Enter {block}() first, and "
                "full_parameters() inside it."
            )

    def export(self, path: str | PathLike[str], model: nn.Module | None) -> None:
        """See Engine.export."""
        if not self._state.world.settings.trial:
            self._state.objects.check_passes()
            with self._common():
                whole_tensors.export(self._state.spec, self._state.states, path, model)

    def model_state_dict(self, model: nn.Module | None) -> dict[str, Any]:
        """See Engine.model_state_dict."""
        self._state.objects.check_passes()
        with self._common():
            return whole_tensors.model_state_dict(self._state.spec, self._state.states, model)

    def _common(self) -> AbstractContextManager[None]:
        """Context manager that swaps in the anchor, unless averages are already swapped in."""
        return nullcontext() if self._state.in_ema else self.anchor()

    def optimizer_state_dict(
        self, optimizer: optim.Optimizer | None, *, for_resume: bool
    ) -> dict[str, Any]:
        """See Engine.optimizer_state_dict."""
        state = self._state
        state.objects.check_passes()
        optimizer = plain_state_dict.only(state.spec, optimizer)
        # A resume continues from the common weights, so their masters must be saved.
        has_masters = state.states.optimizer.has_masters
        with self._common() if has_masters else nullcontext():
            return state.objects.plain_state(optimizer, for_resume=for_resume)

    def load_optimizer_state_dict(
        self, plain: Mapping[str, Any] | None, optimizer: optim.Optimizer | None
    ) -> None:
        """See Engine.load_optimizer_state_dict."""
        spec, objects = self._state.spec, self._state.objects
        self._state.refuse_in_step("engine.load_optimizer_state_dict")
        if any(split is not None for split in (spec.tensor, spec.pipeline, spec.experts)):
            raise UsageError(
                "engine.load_optimizer_state_dict with --tensor, --pipeline or --expert, which "
                "split the optimizer state: load it into the optimizer before sw.Engine(...)."
            )
        run = spec.world_group

        def of_rank_0() -> Mapping[str, Any] | None:
            # Either every rank passes it, or only rank 0. Sending it means pickling the full state,
            # so first check whether that is needed.
            if all(run.gather_plain(plain is not None)):
                return plain
            first: Mapping[str, Any] | None = run.gather_objects(plain if run.leads else None)[0]
            return first

        plain = run.steadily(of_rank_0)
        if plain is None:
            raise UsageError("engine.load_optimizer_state_dict takes a state_dict on rank 0.")
        owner = plain_state_dict.only(spec, optimizer)
        objects.check_state(owner, plain)
        objects.take_state(owner, plain)
