"""Records what each step of an engine computes, for `shardwise verify` (--record-tensors).

Nothing of this is made without the flag. With it every step is followed by one walk over all that
this rank holds, by the same list that checkpoints are written from, so that what is recorded does
not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.accumulation import StepStats
from shardwise.engine.build import States
from shardwise.engine.checkpoint_tensors import Lending
from shardwise.engine.engine_spec import Recipe
from shardwise.model.module_records import ForwardInputs, Named, tensors_beside
from shardwise.states.tensor_spans import Holding, Told, state_name
from shardwise.tensor_log import Fed, Part, TensorLog
from shardwise.world import World


class Recording:
    """What an engine, number `number`, writes down of its steps; `states` are those of the moment.

    Making it and `stepped` are collective, as the list of what ranks hold is.
    """

    def __init__(
        self, world: World, recipe: Recipe, states: Callable[[], States], number: int, folder: Path
    ) -> None:
        self._world = world
        self._recipe = recipe
        self._states = states
        self._number = number
        self._log = TensorLog(folder, world.rank)
        self._inputs = ForwardInputs(_named(recipe), lambda: world.feed.current)
        self._rows = 0
        self._log.note("rank", {"driver": "engine"})
        self._write({})

    def stepped(self, stats: StepStats) -> None:
        """A step is made: write what it left."""
        self._rows += 1
        self._write(
            {
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "weight": stats.weight,
                "skipped": stats.skipped,
            }
        )

    def _write(self, figures: dict[str, Any]) -> None:
        lending = Lending(self._recipe, self._states())
        told = lending.trained.told()
        counts = self._world.counts
        fed, samples = self._inputs.taken()
        figures = figures | {
            "lr": [
                float(g["lr"]) for o in self._recipe.optimizers for g in o.param_groups if "lr" in g
            ],
            "numbers": _numbers(lending, told),
            "parameters": _parameters(self._recipe),
            "order": self._inputs.order,
            "fed": vars(fed) if counts else vars(Fed()),
            "samples": samples if counts else [],
        }
        with torch.no_grad():
            self._log.write(self._number, self._rows, figures, _parts(lending, told))

    def close(self) -> None:
        """Record no longer."""
        self._inputs.close()


def _parts(lending: Lending, told: Told) -> Iterator[Part]:
    """All that this rank has, of tensors and of parts of tensors."""
    odd = lending.out_of_order(told)
    for holding in lending.trained:
        yield from _of_holding(holding, odd)
    buffers = lending.inventory.buffers
    for holding in lending.beside():
        kept = {e.tensor for e in holding.extents} - buffers.keys()
        yield from _of_holding(holding, odd, kept)
    for holding in lending.reordered(told):
        yield from _of_holding(holding, set())
    recipe = lending.recipe
    yield from tensors_beside(_named(recipe), recipe.stage.rank, recipe.runs)


def _named(recipe: Recipe) -> Named:
    return list(zip(recipe.prefixes, recipe.models, strict=True))


def _of_holding(
    holding: Holding, odd: set[tuple[str, str]], kept: set[str] | None = None
) -> Iterator[Part]:
    extents = [
        e
        for e in holding.extents
        if (holding.kind, e.tensor) not in odd and (kept is None or e.tensor in kept)
    ]
    if not extents:
        return
    flat = holding.held.loaded()
    for extent in extents:
        part = flat[extent.start : extent.end]
        yield Part(holding.kind, extent.tensor, part, extent.offset, holding.copy)


def _numbers(lending: Lending, told: Told) -> dict[str, float]:
    """What optimizers keep that is one number for each parameter, such as a count of steps."""
    tracked = lending.states.parameters.tracked
    return {
        state_name(tracked[number].name, key): float(value)
        for number, state in told.states.items()
        for key, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _parameters(recipe: Recipe) -> list[list[tuple[str, tuple[int, ...]]]]:
    """By optimizer the names and shapes of what it has, in its own order."""
    known = {tracked.parameter: tracked for tracked in recipe.located()}
    return [
        [
            (known[p].name, tuple(known[p].whole_shape))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for optimizer in recipe.optimizers
    ]
