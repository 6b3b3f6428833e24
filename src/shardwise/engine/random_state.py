"""Seeds the random generators of a rank by engine, step and rank.

Making an engine moves no generator. When training begins, and at the end of each step, this rank's
generators are seeded for what is drawn next: by engine, step, rank, and micro-shard in the exact
mode.
"""

from __future__ import annotations

from shardwise.engine.engine_state import EngineState
from shardwise.model.module_hooks import Hooked, attach
from shardwise.world import randomness


class RandomState:
    """The generators of this rank while an engine trains.

    They stay where they are until the first batch, or forward of one of the engine's models, to
    train on.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._is_apart = False  # whether this rank draws for itself by now
        self._forget_common_draws()
        draws = state.world.draws
        draws.wait(self._begin)
        self._hooks: list[Hooked] = [
            attach(model.register_forward_pre_hook, draws.before_forward)
            for model in state.spec.models
            if model._compiled_call_impl is None
        ]

    def _begin(self) -> None:
        """Training begins: from now on this rank draws for itself."""
        self.stop_waiting()
        if not self._is_apart:
            self.reseed()

    def stop_waiting(self) -> None:
        """Take the hooks off the models; twice is harmless."""
        while self._hooks:
            self._hooks.pop().remove()

    def _forget_common_draws(self) -> None:
        """Begin anew what the ranks of a replica draw in common."""
        spec = self._state.spec
        if spec.tensor is not None:
            spec.tensor.replica.reset()
        if spec.pipeline is not None:
            seed = self._state.world.seed
            spec.pipeline.seed_forward(randomness.seed_from(seed, "line", *self._state.coordinates))

    def reseed(self) -> None:
        """Seed the generators by what is drawn next, so that it is a pure function of that;
        unless they are the script's own (`--no-reseed`)."""
        state = self._state
        self._is_apart = True
        state.world.draws.part()
        self._forget_common_draws()
        backwards = state.accumulation.backwards
        seed = state.aggregation.seed(state.world.seed, state.number, state.steps, backwards)
        if seed is not None and state.world.settings.reseed:
            randomness.seed_everything(seed)
