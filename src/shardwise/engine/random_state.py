"""Seeds a rank's random generators from the engine, step and rank.

Creating an engine does not change any generator. When training starts, and at the end of each step,
this rank's generators get a seed for the next step: a hash of engine, step and rank. In exact mode
the micro-shard replaces the rank.
"""

from __future__ import annotations

from shardwise.engine.engine_state import EngineState
from shardwise.model.module_hooks import Hooked, attach
from shardwise.world import randomness


class RandomState:
    """Seeds this rank's random generators while an engine trains.

    The generators stay unchanged until the first training batch, or until the first forward pass
    with gradients in one of the engine's models.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._is_apart = False  # True once this rank's random stream differs from other ranks'
        self._forget_common_draws()
        draws = state.world.draws
        draws.wait(self._begin)
        self._hooks: list[Hooked] = [
            attach(model.register_forward_pre_hook, draws.before_forward)
            for model in state.spec.models
            # Hooks on a compiled module would become part of its graph.
            if model._compiled_call_impl is None
        ]

    def _begin(self) -> None:
        """Seed this rank's generators. Called when training starts."""
        # This is a method instead of a closure because `CommonRandomStream` holds it weakly.
        self.stop_waiting()
        if not self._is_apart:
            self.reseed()

    def stop_waiting(self) -> None:
        """Remove the hooks that wait for the first forward pass. Safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()

    def _forget_common_draws(self) -> None:
        """Reset the random streams that a replica's ranks share."""
        spec = self._state.spec
        if spec.tensor is not None:
            spec.tensor.replica.reset()
        if spec.pipeline is not None:
            seed = self._state.world.seed
            spec.pipeline.seed_forward(randomness.seed_from(seed, "line", *self._state.coordinates))

    def reseed(self) -> None:
        """Seed the generators for the next backward pass or step, unless `--no-reseed` is set.

        The seed depends only on the position in training, so a resumed run draws the same numbers.
        """
        state = self._state
        self._is_apart = True
        state.world.draws.part()
        self._forget_common_draws()
        # In exact mode each micro-shard has its own seed, so count the backward passes to know
        # which is next.
        backwards = state.accumulation.backwards
        seed = state.aggregation.seed(state.world.seed, state.number, state.steps, backwards)
        if seed is not None and state.world.settings.reseed:
            randomness.seed_everything(seed)
