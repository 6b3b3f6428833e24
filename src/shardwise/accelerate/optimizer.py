"""Wraps a prepared optimizer so that it steps its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import optim

from shardwise.bridging.trained_engine import TrainedEngine
from shardwise.bridging.trained_models import TrainedModels
from shardwise.errors import UsageError


class ShardedOptimizer(AcceleratedOptimizer):
    """The optimizer that `prepare` returns instead of Accelerate's own class.

    `step` and `zero_grad` have an effect only in the last micro-batch of a step. They act on the
    engine or, before the engine exists, on the plain optimizer. With an engine, `state_dict` and
    `load_state_dict` are collective and use the full state.
    """

    def __init__(self, optimizer: optim.Optimizer, trained: TrainedModels) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._trained = trained

    def move_to(self, trained: TrainedModels) -> None:
        """Assign this optimizer to another Accelerator, whose engines are `trained`."""
        self._trained = trained

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters if this is the last micro-batch of a step. Collective.

        Raises UsageError if this optimizer has no engine.
        """
        if not self.gradient_state.sync_gradients:
            return
        trained = self._engine()
        trained.step(self.optimizer, closure)
        if not (trained.waits or trained.skipped):
            self._trained.call_followers(trained)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients accumulated since the last step.

        Has no effect except in the last micro-batch of a step. The step itself clears the gradients
        that it uses.
        """
        if self.gradient_state.sync_gradients:
            if (trained := self._trained.of(self.optimizer)) is not None:
                trained.clear()
            else:
                self.optimizer.zero_grad(set_to_none is not False)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, on every rank. Collective."""
        if (trained := self._trained.of(self.optimizer)) is None:
            return self.optimizer.state_dict()  # type: ignore[no-any-return]
        return trained.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain optimizer for the same parameters. Collective."""
        if (trained := self._trained.of(self.optimizer)) is None:
            self.optimizer.load_state_dict(state_dict)
        else:
            trained.engine.load_optimizer_state_dict(state_dict, self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step did not update any parameter.

        Raises UsageError if other optimizers of the model have not stepped yet.
        """
        trained = self._trained.of(self.optimizer)
        if trained is None:
            return False
        # Schedulers read this property. If the engine has not stepped yet, they would be a step
        # ahead.
        trained.check_complete("A scheduler's step")
        return trained.skipped

    def _engine(self) -> TrainedEngine:
        trained = self._trained.of(self.optimizer)
        if trained is None:
            why = self._trained.taken_over or (
                "its parameters belong to no prepared model, or to a copy of one. Prepare the "
                "model from whose parameters it was made"
            )
            raise UsageError(f"{type(self.optimizer).__name__}.step() trains nothing: {why}.")
        return trained
