"""Lists the tensors that islands add to a checkpoint, next to model and optimizer.

    set outer       NAME.velocity    of the outer update
                    NAME.mean        a mean difference that is not used yet
    set island-K    NAME.own         the weights that island K trains, and the buffers that its
                                     forwards change, if they are not the anchor
                    NAME.residual    what the wire has lost of its differences so far
                    NAME.sent        its weights when the difference was sent that is not used yet

The model of a checkpoint is the anchor. So a save swaps weights and anchor first, and the storage
of the anchor has the weights of this island then.

With bounded staleness, islands have the same weights:

    set outer       NAME.sum-I       the sums over all islands in transit, the oldest first
    set island-K    NAME.residual    what the wire has lost of the sums of island K so far
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.extra_sets import ExtraTensors, Places
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.tensor_spans import GROUP, OPTIMIZER, OUTER, TensorSpan, state_name
from shardwise.islands.anchor import RESIDUAL, SENT, VALUE, VELOCITY
from shardwise.islands.bounded_staleness import SumsReport, read_reports
from shardwise.islands.delayed_sums import DelayedSums, Flight
from shardwise.islands.difference_exchange import DifferenceExchange
from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.layout.byte_ranges import extents
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import MemoryStorage, Storage

OWN, MEAN = "own", "mean"


def set_name(kind: str, island: int) -> str:
    """Return the set in which `island` keeps its tensors of `kind`."""
    # The optimizer state of the first island has the name of a run without islands, which so can
    # load it.
    if kind == GROUP:
        return f"island-{island}"
    return f"island-{island}-optimizer" if kind == OPTIMIZER and island else kind


class BesideTensors(ExtraTensors):
    """Tensors over the buckets, of which this rank has parts; `places` are by kind."""

    def __init__(self, parameters: Parameters, places: Mapping[str, Places]) -> None:
        self._parameters = parameters
        self._places = places

    @abstractmethod
    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        """Yield kind, key, bucket and storage of all tensors."""

    @abstractmethod
    def _part(self, index: int) -> Span:
        """Return the elements of a bucket that this rank has."""

    @abstractmethod
    def _whole(self, index: int, part: Tensor) -> Tensor:
        """Return all of a bucket from this rank's `part`. Collective over the island."""

    def _bucket(self, index: int) -> Bucket:
        return self._parameters.buckets[index]

    def _names(self, index: int, key: str) -> dict[int, str]:
        return {
            slot.parameter: state_name(self._parameters.named[slot.parameter].name, key)
            for slot in self._bucket(index).slots
        }

    def _is_part(self, index: int) -> bool:
        first = self._bucket(index).slots[0].parameter
        return self._parameters.named[first].shard is not None

    def specs(self) -> dict[str, list[TensorSpec]]:
        """Return the tensors by kind."""
        found: dict[str, list[TensorSpec]] = {GROUP: [], OUTER: []}
        for kind, key, index, storage in self._each():
            for number, name in self._names(index, key).items():
                shape = tuple(self._parameters.named[number].whole_shape)
                found[kind].append(TensorSpec(name, dtype_name(storage.dtype), shape))
        return found

    def __iter__(self) -> Iterator[TensorSpan]:
        """Yield all spans, bucket by bucket."""
        shards = {
            number: named.shard
            for number, named in enumerate(self._parameters.named)
            if named.shard is not None
        }
        for kind, key, index, storage in self._each():
            first, end = self._part(index)
            pieces = self._bucket(index).pieces(first, end)
            found = extents(pieces, first, self._names(index, key), shards)
            yield TensorSpan(kind, storage, found, *self._places[kind][self._is_part(index)])

    def out_of_order(self) -> set[tuple[str, str]]:
        """Return kind and name of tensors whose memory is not in the order of their elements."""
        named = self._parameters.named
        return {
            (kind, name)
            for kind, key, index, _ in self._each()
            for number, name in self._names(index, key).items()
            if not named[number].in_order
        }

    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield these tensors flat in the order of their elements, whole on every rank. Collective
        over the island."""
        for kind, key, index, storage in self._each():
            slots = self._bucket(index).slots
            odd = [s for s in slots if not self._parameters.named[s.parameter].in_order]
            if not odd:
                continue
            flat = self._whole(index, storage.loaded())
            for slot in odd:
                named = self._parameters.named[slot.parameter]
                name = state_name(named.name, key)
                yield kind, name, named.view(flat, slot.start).contiguous().view(-1)

    def _parameters_of(self, index: int) -> list[str]:
        """Return the names of the parameters of a bucket."""
        slots = self._bucket(index).slots
        return [self._parameters.named[slot.parameter].name for slot in slots]


class IslandTensors(BesideTensors):
    """The tensors of `islands` that this rank has, with anchor and weights in each other's place.

    `places` are by kind. With `moved` weights are not the anchor everywhere.
    """

    def __init__(
        self,
        parameters: Parameters,
        islands: DifferenceExchange,
        places: Mapping[str, Places],
        *,
        moved: bool,
    ) -> None:
        super().__init__(parameters, places)
        self._islands = islands
        self.moved = moved

    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        anchor, flying = self._islands.anchor, self._islands.flying
        for index in range(self._islands.buckets):
            if self.moved:
                yield GROUP, OWN, index, anchor.storages[VALUE][index]
            if RESIDUAL in anchor.keys:
                yield GROUP, RESIDUAL, index, anchor.storages[RESIDUAL][index]
            if VELOCITY in anchor.keys:
                yield OUTER, VELOCITY, index, anchor.storages[VELOCITY][index]
            if index in flying:
                yield GROUP, SENT, index, anchor.storages[SENT][index]
                yield OUTER, MEAN, index, MemoryStorage(self._islands.landed(index))

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Islands that have trained by themselves have other statistics.
        return {state_name(n, OWN): value for n, value in held.items()} if self.moved else {}

    def _part(self, index: int) -> Span:
        return self._islands.anchor.parts[index]

    def _whole(self, index: int, part: Tensor) -> Tensor:
        return self._islands.anchor.whole(index, part)

    # -- numbers -----------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """Return by parameter the weight of the steps since its difference was sent, and the step
        after which a difference in transit is used."""
        islands = self._islands
        buckets = range(islands.buckets)
        return {
            "weights": {n: islands.weights[i] for i in buckets for n in self._parameters_of(i)},
            "due": {n: islands.due[i] for i in islands.flying for n in self._parameters_of(i)},
        }

    def take_numbers(self, saved: Mapping[str, Any], step: int) -> None:
        """Restore `saved` numbers at `step`, and expect the differences in transit."""
        for index in range(self._islands.buckets):
            names = self._parameters_of(index)
            self._islands.weights[index] = float(saved["weights"].get(names[0], 0.0))
            # Buckets may differ from those of the save. A difference is used if all parameters of a
            # bucket have one for the same step.
            due = {saved["due"].get(name) for name in names}
            if len(due) == 1 and (when := due.pop()) is not None and when > step:
                self._islands.expect(index, int(when))


FIELD = "behind"
"""The key under which numbers stand in a checkpoint."""


class DelayedTensors(BesideTensors):
    """This rank's parts of `delayed` sums. Iterating waits for sums in transit."""

    def __init__(
        self, parameters: Parameters, delayed: DelayedSums, places: Mapping[str, Places]
    ) -> None:
        super().__init__(parameters, places)
        self._delayed = delayed

    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        for index, residual in enumerate(self._delayed.residuals):
            yield GROUP, "residual", index, residual
        for number, flight in enumerate(self._delayed.flights):
            self._delayed.land(flight)
            for index, total in enumerate(flight.sums):
                assert isinstance(total, Tensor)
                yield OUTER, f"sum-{number}", index, MemoryStorage(total)

    def _part(self, index: int) -> Span:
        return self._delayed.parts[index]

    def _whole(self, index: int, part: Tensor) -> Tensor:
        return self._delayed.whole(index, part)

    def numbers(self, islands: int) -> dict[str, Any]:
        """Return the number of `islands`, and for each step in transit their reports and the
        parameters that had a gradient."""
        waiting = [self._waiting(flight) for flight in self._delayed.flights]
        return {"islands": islands, "updates": self._delayed.updates, "waiting": waiting}

    def _waiting(self, flight: Flight) -> dict[str, Any]:
        named = self._parameters.named
        reports, used = read_reports(self._delayed.reported(flight), len(named))
        return {
            "step": flight.step,
            "reports": json_values.encode([report._asdict() for report in reports]),
            "used": [each.name for each, flag in zip(named, used, strict=True) if flag],
        }

    def take_numbers(self, saved: Mapping[str, Any]) -> None:
        """Restore `saved` numbers, and expect the sums in transit."""
        self._delayed.updates = saved["updates"]
        for each in saved["waiting"]:
            used = [named.name in each["used"] for named in self._parameters.named]
            reports = [
                SumsReport(**{name: float(report[name]) for name in SumsReport._fields})
                for report in json_values.decode(each["reports"])
            ]
            self._delayed.expect(each["step"], [report.row(used) for report in reports])


def joined(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the numbers of the ranks that share out the layers."""
    waiting = [
        dict(each[0]) | {"used": [name for part in each for name in part["used"]]}
        for each in zip(*(numbers["waiting"] for numbers in several), strict=True)
    ]
    return dict(several[0]) | {"waiting": waiting}
