"""Lists the tensors that islands add to a checkpoint, in addition to model and optimizer.

    set outer       NAME.velocity    the outer update's velocity
                    NAME.mean        a mean difference that has not been applied yet
    set island-K    NAME.own         island K's weights, and the buffers that its forward passes
                                     change, if they differ from the anchor
                    NAME.residual    rounding errors in island K's differences
                    NAME.sent        island K's weights when the pending difference was sent

The checkpoint's model is the anchor. Weights and anchor are therefore swapped during a save, and
the anchor's storage temporarily holds this island's weights.

With bounded staleness, all islands have the same weights:

    set outer       NAME.sum-I       pending sums over all islands, oldest first
    set island-K    NAME.residual    rounding errors in island K's sums
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.extra_sets import ExtraTensors
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.tensor_spans import (
    GROUP,
    OPTIMIZER,
    OUTER,
    Places,
    StoredTensors,
    state_name,
)
from shardwise.islands.anchor import RESIDUAL, SENT, VALUE, VELOCITY, Anchor
from shardwise.islands.bounded_staleness import SumsReport, read_reports
from shardwise.islands.delayed_sums import DelayedSums, Flight
from shardwise.islands.difference_exchange import DifferenceExchange
from shardwise.layout.bucket_layout import Bucket
from shardwise.layout.byte_ranges import extents
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import MemoryStorage, Storage

OWN, MEAN = "own", "mean"


def set_name(kind: str, island: int) -> str:
    """Return the name of the set that holds island `island`'s tensors of kind `kind`."""
    # The first island's optimizer state has the same name as in a run without islands, so that such
    # a run can load it.
    if kind == GROUP:
        return f"island-{island}"
    return f"island-{island}-optimizer" if kind == OPTIMIZER and island else kind


class BucketTensors(ExtraTensors):
    """Base class for tensors that are stored by `source`, one per bucket, in parts on each rank.

    `places` maps each kind of set to the places of its tensors in the checkpoint.
    """

    def __init__(
        self,
        parameters: Parameters,
        source: Anchor | DelayedSums,
        places: Mapping[str, Places],
    ) -> None:
        self._parameters = parameters
        self._source = source
        self._places = places

    @abstractmethod
    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        """Yield (kind, key, bucket index, storage) for each tensor."""

    def _bucket(self, index: int) -> Bucket:
        return self._parameters.buckets[index]

    def _names(self, index: int, key: str) -> dict[int, str]:
        return {
            slot.parameter: state_name(self._parameters.named[slot.parameter].name, key)
            for slot in self._bucket(index).slots
        }

    def specs(self) -> dict[str, list[TensorSpec]]:
        """Return the specs of all tensors, by kind of set."""
        specs: dict[str, list[TensorSpec]] = {GROUP: [], OUTER: []}
        for kind, key, index, storage in self._each():
            for number, name in self._names(index, key).items():
                shape = tuple(self._parameters.named[number].whole_shape)
                specs[kind].append(TensorSpec(name, dtype_name(storage.dtype), shape))
        return specs

    def __iter__(self) -> Iterator[StoredTensors]:
        """Yield this rank's part of every tensor, bucket by bucket."""
        shards = {
            number: named.shard
            for number, named in enumerate(self._parameters.named)
            if named.shard is not None
        }
        for kind, key, index, storage in self._each():
            first, end = self._source.parts[index]
            bucket = self._bucket(index)
            ranges = extents(bucket.pieces(first, end), first, self._names(index, key), shards)
            # Either all parameters of a bucket are split or none.
            axis = bucket.axis if bucket.slots[0].parameter in shards else None
            yield StoredTensors(kind, storage, ranges, *self._places[kind][axis])

    def out_of_order(self) -> set[tuple[str, str]]:
        """Return (kind, name) of each tensor whose memory order differs from its element order."""
        named = self._parameters.named
        return {
            (kind, name)
            for kind, key, index, _ in self._each()
            for number, name in self._names(index, key).items()
            if not named[number].in_order
        }

    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, full flat tensor) of the tensors in `out_of_order`, in element order.

        Collective over the island. Every rank receives the full tensors.
        """
        for kind, key, index, storage in self._each():
            slots = self._bucket(index).slots
            out_of_order = [s for s in slots if not self._parameters.named[s.parameter].in_order]
            if not out_of_order:
                continue
            flat = self._source.whole(index, storage.loaded())
            for slot in out_of_order:
                named = self._parameters.named[slot.parameter]
                name = state_name(named.name, key)
                yield kind, name, named.view(flat, slot.start).contiguous().view(-1)

    def _parameters_of(self, index: int) -> list[str]:
        slots = self._bucket(index).slots
        return [self._parameters.named[slot.parameter].name for slot in slots]


class IslandTensors(BucketTensors):
    """This rank's parts of the tensors in `islands`, while anchor and weights are swapped.

    `moved` is True if the weights differ from the anchor on any rank.
    """

    def __init__(
        self,
        parameters: Parameters,
        islands: DifferenceExchange,
        places: Mapping[str, Places],
        *,
        moved: bool,
    ) -> None:
        super().__init__(parameters, islands.anchor, places)
        self._islands = islands
        self.moved = moved

    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        anchor, flying = self._islands.anchor, self._islands.in_transit
        for index in range(self._islands.buckets):
            # The anchor's storage holds this island's weights, because they are swapped.
            if self.moved:
                yield GROUP, OWN, index, anchor.storages[VALUE][index]
            if RESIDUAL in anchor.keys:
                yield GROUP, RESIDUAL, index, anchor.storages[RESIDUAL][index]
            if VELOCITY in anchor.keys:
                yield OUTER, VELOCITY, index, anchor.storages[VELOCITY][index]
            if index in flying:
                yield GROUP, SENT, index, anchor.storages[SENT][index]
                yield OUTER, MEAN, index, MemoryStorage(self._islands.receive_mean(index))

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Islands that train separately have different running statistics.
        return {state_name(n, OWN): value for n, value in held.items()} if self.moved else {}

    # -- numbers -----------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """Return two numbers per parameter, under the keys "weights" and "due".

        "weights" is the total weight of the steps since the parameter's difference was last sent.
        "due" is the step after which its pending difference is applied.
        """
        islands = self._islands
        buckets = range(islands.buckets)
        return {
            "weights": {n: islands.weights[i] for i in buckets for n in self._parameters_of(i)},
            "due": {n: islands.due[i] for i in islands.in_transit for n in self._parameters_of(i)},
        }

    def take_numbers(self, saved: Mapping[str, Any], step: int) -> None:
        """Restore the numbers from a checkpoint. `saved` is the result of `numbers` at step `step`.

        Adds zeros in place of pending differences, which are loaded later.
        """
        for index in range(self._islands.buckets):
            names = self._parameters_of(index)
            self._islands.weights[index] = float(saved["weights"].get(names[0], 0.0))
            # The buckets may have changed since the save. Use a difference only if all parameters
            # of the bucket have one that is due after the same step.
            due = {saved["due"].get(name) for name in names}
            if len(due) == 1 and (when := due.pop()) is not None and when > step:
                self._islands.expect(index, int(when))


FIELD = "behind"
"""The checkpoint field that holds the numbers of `DelayedTensors`."""


class DelayedTensors(BucketTensors):
    """This rank's parts of the pending sums in `delayed`. Iterating waits until they arrive."""

    def __init__(
        self, parameters: Parameters, delayed: DelayedSums, places: Mapping[str, Places]
    ) -> None:
        super().__init__(parameters, delayed, places)
        self._delayed = delayed

    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        for index, residual in enumerate(self._delayed.residuals):
            yield GROUP, "residual", index, residual
        for number, flight in enumerate(self._delayed.flights):
            self._delayed.receive(flight)
            for index, total in enumerate(flight.sums):
                assert isinstance(total, Tensor)
                yield OUTER, f"sum-{number}", index, MemoryStorage(total)

    def numbers(self, islands: int) -> dict[str, Any]:
        """Return the checkpoint fields: island count, number of updates, and pending steps.

        Each pending step contains the reports and the names of parameters that had a gradient.
        """
        waiting = [self._numbers_of(flight) for flight in self._delayed.flights]
        return {"islands": islands, "updates": self._delayed.updates, "waiting": waiting}

    def _numbers_of(self, flight: Flight) -> dict[str, Any]:
        named = self._parameters.named
        reports, used = read_reports(self._delayed.receive_reports(flight), len(named))
        return {
            "step": flight.step,
            "reports": json_values.encode([report._asdict() for report in reports]),
            "used": [each.name for each, flag in zip(named, used, strict=True) if flag],
        }

    def take_numbers(self, saved: Mapping[str, Any]) -> None:
        """Restore the fields from a checkpoint. `saved` is the result of `numbers`.

        Adds zeros in place of pending sums, which are loaded later.
        """
        self._delayed.updates = saved["updates"]
        for each in saved["waiting"]:
            used = [named.name in each["used"] for named in self._parameters.named]
            reports = [
                SumsReport(**{name: float(report[name]) for name in SumsReport._fields})
                for report in json_values.decode(each["reports"])
            ]
            self._delayed.expect(each["step"], [report.row(used) for report in reports])


def join_numbers(numbers_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the results of `numbers` from all pipeline stages."""
    waiting = [
        dict(each[0]) | {"used": [name for part in each for name in part["used"]]}
        for each in zip(*(numbers["waiting"] for numbers in numbers_by_rank), strict=True)
    ]
    return dict(numbers_by_rank[0]) | {"waiting": waiting}
