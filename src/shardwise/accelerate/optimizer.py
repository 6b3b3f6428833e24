"""A prepared optimizer, which steps the engine that trains with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import optim

from shardwise.bridging.trained_engine import TrainedEngine
from shardwise.bridging.trained_models import TrainedModels
from shardwise.errors import UsageError


class ShardedOptimizer(AcceleratedOptimizer):
    """Replaces Accelerate's own: `step` and `zero_grad` act only in the last micro-batch of a step,
    on the engine.

    Before its engine is made it is the plain optimizer. With an engine `state_dict` and
    `load_state_dict` are collective and have the whole state.
    """

    def __init__(self, optimizer: optim.Optimizer, trained: TrainedModels) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._trained = trained

    def move_to(self, trained: TrainedModels) -> None:
        """Belong to the Accelerator of `trained`."""
        self._trained = trained

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update, in the last micro-batch of a step. Collective.

        Raises UsageError if no engine trains with it.
        """
        if not self.gradient_state.sync_gradients:
            return
        trained = self._engine()
        trained.step(self.optimizer, closure)
        if not (trained.waits or trained.skipped):
            self._trained.tell_followers(trained)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients since the last step, in the last micro-batch of a step. The step
        itself clears the gradients that it used."""
        if self.gradient_state.sync_gradients:
            if (trained := self._trained.of(self.optimizer)) is not None:
                trained.clear()
            else:
                self.optimizer.zero_grad(set_to_none is not False)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, on every rank. Collective."""
        if (trained := self._trained.of(self.optimizer)) is None:
            return self.optimizer.state_dict()  # type: ignore[no-any-return]
        return trained.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain optimizer over the same parameters. Collective."""
        if (trained := self._trained.of(self.optimizer)) is None:
            self.optimizer.load_state_dict(state_dict)
        else:
            trained.engine.load_optimizer_state_dict(state_dict, self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step updated nothing. Raises UsageError while it waits for the other
        optimizers of its model, because a scheduler would be a step ahead."""
        trained = self._trained.of(self.optimizer)
        if trained is None:
            return False
        trained.check_complete("A scheduler's step")
        return trained.skipped

    def _engine(self) -> TrainedEngine:
        trained = self._trained.of(self.optimizer)
        if trained is None:
            why = self._trained.taken_over or (
                "its parameters belong to no model that was prepared, or to a copy of one. Prepare "
                "the model that it was made for"
            )
            raise UsageError(f"{type(self.optimizer).__name__}.step() trains nothing: {why}.")
        return trained
