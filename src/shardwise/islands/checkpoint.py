"""Saves and loads the states of islands, through the checkpoint's interface for extra sets.

If the checkpoint has the same number of islands as this run, each island loads its own sets.
Otherwise each island loads the mean over all islands' sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.extra_sets import ExtraSets, ExtraTensors, Sets, SetsToRead
from shardwise.checkpoint.format import TensorSpec, dtype_of
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import GROUP, OPTIMIZER, Places, StoredTensors
from shardwise.comm import Collectives, Solo
from shardwise.islands.bounded_staleness import BoundedStaleness
from shardwise.islands.checkpoint_tensors import (
    FIELD,
    OWN,
    DelayedTensors,
    IslandTensors,
    join_numbers,
    set_name,
)
from shardwise.islands.parameter_averaging import ParameterAveraging
from shardwise.states.step_hooks import StepHooks


class IslandSets(ExtraSets):
    """The checkpoint sets `island-K`, `island-K-optimizer` and `outer`, and their fields.

    The fields are `islands` and `behind`. In a run without islands, this class loads checkpoints
    that runs with islands have written.
    """

    def __init__(self, hooks: StepHooks | None, peers: Collectives) -> None:
        self._averaging = hooks if isinstance(hooks, ParameterAveraging) else None
        self._staleness = hooks if isinstance(hooks, BoundedStaleness) else None
        self._peers = peers
        self._apart = peers if self._staleness is None else Solo()
        """The peers if islands have different weights, otherwise this rank alone."""

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        return kind if kind == OPTIMIZER and self._averaging is None else set_name(kind, group)

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None and averaging.exchange.has_begun:
            exchange = averaging.exchange
            moved = averaging.world_group.gather_plain(not exchange.anchor.is_reached)
            return IslandTensors(averaging.parameters, exchange, places, moved=any(moved))
        if staleness is not None:
            return DelayedTensors(staleness.parameters, staleness.sums, places)
        return None

    def fields(
        self, own_fields: Mapping[str, Any], gather_from_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None and averaging.exchange.has_begun:
            numbers: dict[str, dict[str, Any]] = {"weights": {}, "due": {}}
            tensors = IslandTensors(averaging.parameters, averaging.exchange, {}, moved=False)
            for each in gather_from_layers(tensors.numbers()):
                for key, values in each.items():
                    numbers[key] |= values
            of_island = {"state": own_fields["state"], "borders": own_fields["borders"]}
            of_island |= numbers | {"scaling": own_fields["scaling"]}
            return {"islands": self._peers.gather_objects(of_island)}
        if staleness is not None:
            delayed = DelayedTensors(staleness.parameters, staleness.sums, {})
            return {FIELD: join_numbers(gather_from_layers(delayed.numbers(self._peers.size)))}
        return {}

    # -- loading --------------------------------------------------------------------------

    def select_sets(
        self, sets: Sets, fields: Mapping[str, Any], buffers: Set[str], *, model_only: bool
    ) -> SetsToRead:
        apart = self._apart
        visible, visible_fields = _select_for_island(sets, fields, apart)
        # If the number of islands differs, no residuals in the checkpoint apply to this island,
        # because its gradients are different.
        residuals, saved = set_name(GROUP, self._peers.rank), fields.get(FIELD, {}).get("islands")
        if saved == self._peers.size and residuals in sets:
            visible[GROUP] = sets[residuals]
        own_tensors = {}
        if GROUP in visible and not model_only:
            names = {
                n.removesuffix(f".{OWN}"): n for n in visible[GROUP].specs if n.endswith(f".{OWN}")
            }
            # A run without islands starts from the mean of the islands' weights. An island starts
            # from the common weights, but with its own buffers.
            own_tensors = {
                name: (visible[GROUP], stored_name)
                for name, stored_name in names.items()
                if apart.size == 1 or name in buffers
            }
        return SetsToRead(visible, visible_fields, own_tensors)

    def before_model(self) -> None:
        # With strict=False some parameters may keep their values, which must be identical on all
        # islands.
        if self._averaging is not None:
            self._averaging.restore_common_weights()

    def start_again(self) -> None:
        if self._averaging is not None:
            self._averaging.exchange.forget()
            self._averaging.exchange.has_begun = False
        if self._staleness is not None:
            self._staleness.sums.restart()

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[StoredTensors]], None],
    ) -> None:
        averaging, staleness = self._averaging, self._staleness
        if averaging is not None:
            exchange = averaging.exchange
            exchange.forget()
            exchange.has_begun = "weights" in source.fields  # written by several islands
            if exchange.has_begun:  # otherwise the first step starts from the weights
                tensors = IslandTensors(averaging.parameters, exchange, places, moved=True)
                with torch.no_grad():
                    exchange.anchor.restart()
                    tensors.take_numbers(source.fields, step)
                    fill(tensors)
                    # Now the weights hold the anchor, and the anchor's storage holds the island's
                    # `own` weights.
                    exchange.anchor.swap()
        if staleness is not None:
            staleness.sums.restart()
            delayed = DelayedTensors(staleness.parameters, staleness.sums, places)
            delayed.take_numbers(source.fields.get(FIELD, {"updates": 0, "waiting": []}))
            fill(delayed)

    def notes(self, fields: Mapping[str, Any]) -> Iterator[str]:
        if fields.get(FIELD, {}).get("waiting") and self._staleness is None:
            yield (
                "the checkpoint has gradients that islands have not used yet (--behind): this run "
                "drops them."
            )
        saved, here = _count(fields), self._apart.size
        if saved not in (1, here):
            yield (
                f"the checkpoint is of {saved} islands, but this run has {here}: weights and "
                "optimizer states become their mean."
            )


# -- the part of one island ---------------------------------------------------------------------


class MeanReader(TensorReader):
    """Reads the tensors that have the same name in several readers, and returns their mean.

    Tensors that are not floating-point are read from the first reader that has them.
    """

    def __init__(self, readers: Sequence[TensorReader]) -> None:
        self._readers = readers
        specs: dict[str, TensorSpec] = {}
        # Iterate in reverse, so that for each name the first reader's spec takes precedence.
        for reader in reversed(readers):
            specs |= reader.specs
        self.specs = specs

    def read(self, name: str, first: int, into: Tensor) -> None:
        readers = [reader for reader in self._readers if name in reader.specs]
        dtype = dtype_of(self.specs[name].dtype)
        if not dtype.is_floating_point:
            readers[0].read(name, first, into)
            return
        # Use fp64, so that the mean of equal values is exactly that value.
        total = torch.zeros(into.numel(), dtype=torch.float64)
        part = torch.empty(into.numel(), dtype=dtype)
        for reader in readers:
            reader.read(name, first, part)
            total += part
        into.copy_(total / len(readers))


def _count(fields: Mapping[str, Any]) -> int:
    """Return the number of islands that wrote the checkpoint (1 if it has no islands)."""
    return len(fields.get("islands") or [None])


def _select_for_island(
    sets: Sets, fields: Mapping[str, Any], peers: Collectives
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    """Select the checkpoint's sets and fields that this rank's island reads."""
    saved, islands = _count(fields), fields.get("islands")
    if not islands:
        return dict(sets), dict(fields)
    if saved == peers.size:
        names_by_kind = {kind: [set_name(kind, peers.rank)] for kind in (OPTIMIZER, GROUP)}
        merged = dict(fields) | islands[peers.rank]
    else:
        names_by_kind = {
            kind: [set_name(kind, k) for k in range(saved)] for kind in (OPTIMIZER, GROUP)
        }
        merged = dict(fields) | {"weights": {}, "due": islands[0]["due"]}
        merged["state"] = _merge_largest([each["state"] for each in islands])
        merged["borders"] = sorted({name for each in islands for name in each["borders"]})
    visible = {kind: readers for kind, readers in sets.items() if kind != OPTIMIZER}
    for kind, names in names_by_kind.items():
        if readers := [sets[name] for name in names if name in sets]:
            visible[kind] = readers[0] if len(readers) == 1 else MeanReader(readers)
    return visible, merged


def _merge_largest(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the maximum of each parameter's values over the islands.

    Values are optimizer counters, such as the number of steps. They may be missing on islands that
    have never used the parameter.
    """
    largest: dict[str, dict[str, Any]] = {}
    for each in states:
        for name, values in each.items():
            values_here = largest.setdefault(name, {})
            for key, value in values.items():
                values_here[key] = max(values_here.get(key, value), value, key=_as_number)
    return largest


def _as_number(value: Any) -> float:
    """Decode a value to a comparable number. Return 0 if it is not a number."""
    number = json_values.decode(value)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return float(number) if isinstance(number, int | float) else 0.0
