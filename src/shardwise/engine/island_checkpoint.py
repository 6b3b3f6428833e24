"""Saves and loads what islands keep next to model and optimizer, by the hook of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from shardwise.checkpoint.extra_sets import ExtraSets, ExtraTensors, Places, Sets, SetsToRead
from shardwise.checkpoint.tensor_spans import ISLAND, OPTIMIZER, TensorSpan
from shardwise.engine import delayed_tensors, island_sets, island_states
from shardwise.engine.delayed_tensors import FIELD, DelayedTensors
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.island_tensors import OWN, IslandTensors, set_name
from shardwise.engine.user_objects import UserObjects


class IslandSets(ExtraSets):
    """The sets `island-K`, `island-K-optimizer` and `outer`, and the fields `islands` and `behind`.

    Without islands, it reads the checkpoints of runs that had some.
    """

    def __init__(self, spec: EngineSpec, objects: UserObjects) -> None:
        self._spec = spec
        self._objects = objects

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        return kind if kind == OPTIMIZER and not self._spec.steps_apart else set_name(kind, group)

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        states = self._objects.states
        if states.islands is not None and states.islands.begun:
            moved = self._spec.world_group.gather_plain(not states.islands.anchor.is_reached)
            return IslandTensors(states.parameters, states.islands, places, moved=any(moved))
        if states.delayed is not None:
            return DelayedTensors(states.parameters, states.delayed, places)
        return None

    def fields(
        self, mine: Mapping[str, Any], of_all_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        states, peers = self._objects.states, self._spec.peers
        if states.islands is not None and states.islands.begun:
            beside: dict[str, dict[str, Any]] = {"weights": {}, "due": {}}
            tensors = IslandTensors(states.parameters, states.islands, {}, moved=False)
            for each in of_all_layers(tensors.numbers()):
                for key, values in each.items():
                    beside[key] |= values
            of_island = {"state": mine["state"], "borders": mine["borders"]}
            of_island |= beside | {"scaling": mine["scaling"]}
            return {"islands": peers.gather_objects(of_island)}
        if states.delayed is not None:
            waiting = DelayedTensors(states.parameters, states.delayed, {})
            return {FIELD: delayed_tensors.joined(of_all_layers(waiting.numbers(peers.size)))}
        return {}

    # -- loading --------------------------------------------------------------------------

    def read_as(
        self, sets: Sets, fields: Mapping[str, Any], buffers: Set[str], *, model_only: bool
    ) -> SetsToRead:
        apart = self._spec.apart
        mine, seen = island_sets.seen(sets, fields, apart)
        mine |= island_sets.residual_of(sets, fields, self._spec.peers)
        own = {}
        if ISLAND in mine and not model_only:
            names = {
                n.removesuffix(f".{OWN}"): n for n in mine[ISLAND].specs if n.endswith(f".{OWN}")
            }
            # A run without islands continues from the mean of the weights that islands trained,
            # an island from what they had in common, but with its own buffers.
            own = {
                name: (mine[ISLAND], theirs)
                for name, theirs in names.items()
                if apart.size == 1 or name in buffers
            }
        return SetsToRead(mine, seen, own)

    def before_model(self) -> None:
        # What strict=False leaves as it is must be the same on all islands.
        island_states.rest_on_anchor(self._objects.states.islands)

    def start_again(self) -> None:
        states = self._objects.states
        if states.islands is not None:
            states.islands.forget()
            states.islands.begun = False
        if states.delayed is not None:
            states.delayed.restart()

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[TensorSpan]], None],
    ) -> None:
        states = self._objects.states
        islands, delayed = states.islands, states.delayed
        if islands is not None:
            islands.forget()
            islands.begun = "weights" in source.fields  # several islands wrote it
            if islands.begun:  # else the first step begins from the weights
                tensors = IslandTensors(states.parameters, islands, places, moved=True)
                with torch.no_grad():
                    islands.anchor.restart()
                    tensors.take_numbers(source.fields, step)
                    fill(tensors)
                    islands.anchor.swap()
        if delayed is not None:
            delayed.restart()
            waiting = DelayedTensors(states.parameters, delayed, places)
            waiting.take_numbers(source.fields.get(FIELD, {"updates": 0, "waiting": []}))
            fill(waiting)

    def notes(self, fields: Mapping[str, Any]) -> Iterator[str]:
        if fields.get(FIELD, {}).get("waiting") and self._spec.staleness is None:
            yield (
                "the checkpoint has gradients that islands were to use yet (--behind): this run "
                "leaves them out."
            )
        saved, here = island_sets.count(fields), self._spec.apart.size
        if saved not in (1, here):
            yield (
                f"the checkpoint is of {saved} islands, and here {'is' if here == 1 else 'are'} "
                f"{here}: their weights and optimizer states become the mean of those."
            )
