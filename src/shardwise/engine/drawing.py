"""The part of an engine that decides what random numbers are a function of.

Making an engine moves no generator. When training begins, and at the end of each step, this rank's
generators are seeded by what is drawn: engine, step, rank, and micro-shard in the exact mode.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardwise import randomness
from shardwise.engine.accumulation import Window
from shardwise.engine.engine_spec import Recipe
from shardwise.engine.resumable import Resumable
from shardwise.engine.step_statistics import Parts
from shardwise.model.module_hooks import Hooked, attach


class Drawing(Resumable):
    """What seeds the generators of a rank; an engine is one."""

    _recipe: Recipe
    _parts: Parts
    _window: Window
    _number: int
    _draws_apart = False
    """Whether this rank draws for itself by now."""
    _watched: list[Hooked]

    def _begin_draws(self, models: Iterable[nn.Module]) -> None:
        """Wait for the first batch, or forward of one of `models`, to train on."""
        self._forget_draws()
        self.world.draws.wait(self._go_apart)
        hook = self.world.draws.before_forward
        plain = (model for model in models if model._compiled_call_impl is None)
        self._watched = [attach(model.register_forward_pre_hook, hook) for model in plain]

    def _go_apart(self) -> None:
        """Training begins: from now on this rank draws for itself."""
        self._stop_watching()
        if not self._draws_apart:
            self._reseed()

    def _stop_watching(self) -> None:
        while self._watched:
            self._watched.pop().remove()

    def _forget_draws(self) -> None:
        """What the ranks of a replica draw in common begins anew."""
        if self._recipe.split is not None:
            self._recipe.split.replica.forget()
        if self._recipe.line is not None:
            coordinates = self._number, self.steps, self.world.data_rank, self._window.backwards
            self._recipe.line.begin(randomness.seed_from(self.world.seed, "line", *coordinates))

    def _reseed(self) -> None:
        """Let what is drawn from now on be a pure function of what it is drawn for, unless the
        generators are the script's own (`--no-reseed`)."""
        self._draws_apart = True
        self.world.draws.part()
        self._forget_draws()
        seed = self._parts.seed(self.world.seed, self._number, self.steps, self._window.backwards)
        if seed is not None and self.world.settings.reseed:
            randomness.seed_everything(seed)
