"""Saves and loads what islands keep next to model and optimizer, by the hook of checkpoints.

A checkpoint of as many islands as there are here gives each its own sets. With another number, each
reads the mean of the sets of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.extra_sets import ExtraSets, ExtraTensors, Places, Sets, SetsToRead
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import GROUP, OPTIMIZER, TensorSpan
from shardwise.comm import Collectives, Solo
from shardwise.islands.bounded_staleness import BoundedStaleness
from shardwise.islands.checkpoint_tensors import (
    FIELD,
    OWN,
    DelayedTensors,
    IslandTensors,
    joined,
    set_name,
)
from shardwise.islands.parameter_averaging import ParameterAveraging
from shardwise.states.step_hooks import StepHooks


class IslandSets(ExtraSets):
    """The sets `island-K`, `island-K-optimizer` and `outer`, and the fields `islands` and `behind`.

    Without islands, it reads the checkpoints of runs that had some.
    """

    def __init__(self, hooks: StepHooks | None, peers: Collectives) -> None:
        self._averaging = hooks if isinstance(hooks, ParameterAveraging) else None
        self._staleness = hooks if isinstance(hooks, BoundedStaleness) else None
        self._peers = peers
        self._apart = peers if self._staleness is None else Solo()
        """The ranks of equal place in the islands that have weights of their own."""

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        return kind if kind == OPTIMIZER and self._averaging is None else set_name(kind, group)

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None and averaging.exchange.begun:
            exchange = averaging.exchange
            moved = averaging.world_group.gather_plain(not exchange.anchor.is_reached)
            return IslandTensors(averaging.parameters, exchange, places, moved=any(moved))
        if staleness is not None:
            return DelayedTensors(staleness.parameters, staleness.sums, places)
        return None

    def fields(
        self, mine: Mapping[str, Any], of_all_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None and averaging.exchange.begun:
            beside: dict[str, dict[str, Any]] = {"weights": {}, "due": {}}
            tensors = IslandTensors(averaging.parameters, averaging.exchange, {}, moved=False)
            for each in of_all_layers(tensors.numbers()):
                for key, values in each.items():
                    beside[key] |= values
            of_island = {"state": mine["state"], "borders": mine["borders"]}
            of_island |= beside | {"scaling": mine["scaling"]}
            return {"islands": self._peers.gather_objects(of_island)}
        if staleness is not None:
            waiting = DelayedTensors(staleness.parameters, staleness.sums, {})
            return {FIELD: joined(of_all_layers(waiting.numbers(self._peers.size)))}
        return {}

    # -- loading --------------------------------------------------------------------------

    def read_as(
        self, sets: Sets, fields: Mapping[str, Any], buffers: Set[str], *, model_only: bool
    ) -> SetsToRead:
        apart = self._apart
        mine, seen = _seen_by_island(sets, fields, apart)
        mine |= _residual_of(sets, fields, self._peers)
        own = {}
        if GROUP in mine and not model_only:
            names = {
                n.removesuffix(f".{OWN}"): n for n in mine[GROUP].specs if n.endswith(f".{OWN}")
            }
            # A run without islands continues from the mean of the weights that islands trained,
            # an island from what they had in common, but with its own buffers.
            own = {
                name: (mine[GROUP], theirs)
                for name, theirs in names.items()
                if apart.size == 1 or name in buffers
            }
        return SetsToRead(mine, seen, own)

    def before_model(self) -> None:
        # What strict=False leaves as it is must be the same on all islands.
        if self._averaging is not None:
            self._averaging.restore_common_weights()

    def start_again(self) -> None:
        if self._averaging is not None:
            self._averaging.exchange.forget()
            self._averaging.exchange.begun = False
        if self._staleness is not None:
            self._staleness.sums.restart()

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[TensorSpan]], None],
    ) -> None:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None:
            exchange = averaging.exchange
            exchange.forget()
            exchange.begun = "weights" in source.fields  # several islands wrote it
            if exchange.begun:  # else the first step begins from the weights
                tensors = IslandTensors(averaging.parameters, exchange, places, moved=True)
                with torch.no_grad():
                    exchange.anchor.restart()
                    tensors.take_numbers(source.fields, step)
                    fill(tensors)
                    # The weights are the anchor now, and `own` was read into its place.
                    exchange.anchor.swap()
        if staleness is not None:
            staleness.sums.restart()
            waiting = DelayedTensors(staleness.parameters, staleness.sums, places)
            waiting.take_numbers(source.fields.get(FIELD, {"updates": 0, "waiting": []}))
            fill(waiting)

    def notes(self, fields: Mapping[str, Any]) -> Iterator[str]:
        if fields.get(FIELD, {}).get("waiting") and self._staleness is None:
            yield (
                "the checkpoint has gradients that islands were to use yet (--behind): this run "
                "leaves them out."
            )
        saved, here = _count(fields), self._apart.size
        if saved not in (1, here):
            yield (
                f"the checkpoint is of {saved} islands, and here {'is' if here == 1 else 'are'} "
                f"{here}: their weights and optimizer states become the mean of those."
            )


# -- what an island reads -----------------------------------------------------------------------


class MeanReader(TensorReader):
    """Reads the mean of the tensors that several `readers` have under one name.

    Tensors that are not floating-point are those of the first reader.
    """

    def __init__(self, readers: Sequence[TensorReader]) -> None:
        self._readers = readers
        specs: dict[str, TensorSpec] = {}
        for reader in reversed(readers):
            specs |= reader.specs
        self.specs = specs

    def read(self, name: str, first: int, into: Tensor) -> None:
        held = [reader for reader in self._readers if name in reader.specs]
        dtype = dtype_of(self.specs[name].dtype)
        if not dtype.is_floating_point:
            held[0].read(name, first, into)
            return
        # In fp64, so that the mean of equal values is exactly that value.
        total = torch.zeros(into.numel(), dtype=torch.float64)
        part = torch.empty(into.numel(), dtype=dtype)
        for reader in held:
            reader.read(name, first, part)
            total += part
        into.copy_(total / len(held))


def _count(fields: Mapping[str, Any]) -> int:
    """Return the number of islands that wrote the checkpoint with these `fields`."""
    return len(fields.get("islands") or [None])


def _seen_by_island(
    sets: Sets, fields: Mapping[str, Any], peers: Collectives
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    """Return the `sets` and `fields` that this rank's island reads, out of those of all."""
    saved, islands = _count(fields), fields.get("islands")
    if not islands:
        return dict(sets), dict(fields)
    if saved == peers.size:
        mine = {kind: [set_name(kind, peers.rank)] for kind in (OPTIMIZER, GROUP)}
        found = dict(fields) | islands[peers.rank]
    else:
        mine = {kind: [set_name(kind, k) for k in range(saved)] for kind in (OPTIMIZER, GROUP)}
        found = dict(fields) | {"weights": {}, "due": islands[0]["due"]}
        found["state"] = _most([each["state"] for each in islands])
        found["borders"] = sorted({name for each in islands for name in each["borders"]})
    view = {kind: held for kind, held in sets.items() if kind != OPTIMIZER}
    for kind, names in mine.items():
        if held := [sets[name] for name in names if name in sets]:
            view[kind] = held[0] if len(held) == 1 else MeanReader(held)
    return view, found


def _residual_of(sets: Sets, fields: Mapping[str, Any], peers: Collectives) -> Sets:
    """Return the set with the wire's losses of this island's gradients.

    A checkpoint of another number of islands has none for it: its islands had other gradients.
    """
    name = set_name(GROUP, peers.rank)
    saved = fields.get("behind", {}).get("islands")
    return {GROUP: sets[name]} if saved == peers.size and name in sets else {}


def _most(several: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return by parameter the largest of the values that islands have, such as numbers of steps:
    some may never have used a parameter."""
    found: dict[str, dict[str, Any]] = {}
    for each in several:
        for name, values in each.items():
            mine = found.setdefault(name, {})
            for key, value in values.items():
                mine[key] = max(mine.get(key, value), value, key=_size)
    return found


def _size(value: Any) -> float:
    """Return an encoded value as a number to compare; 0 if it is none."""
    number = json_values.decode(value)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return float(number) if isinstance(number, int | float) else 0.0
