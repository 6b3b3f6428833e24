"""Names what a checkpoint holds of islands: the tensors that they have beside model and optimizer.

    set outer       NAME.velocity    of the update of the anchor
                    NAME.mean        a mean difference that is not due yet
    set island-K    NAME.own         the weights that island K trains, and the buffers that its
                                     forwards change, where weights are not the anchor
                    NAME.residual    what the wire has lost of its differences so far
                    NAME.sent        its weights when the difference that is not due was sent

The model of a checkpoint is the anchor, so all of this is taken and given while the weights are the
anchor: what is in the anchor's place then are the weights of this island.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from shardwise.checkpoint.extra_sets import ExtraTensors, Places
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.tensor_spans import ISLAND, OPTIMIZER, OUTER, TensorSpan, state_name
from shardwise.islands.anchor import RESIDUAL, SENT, VALUE, VELOCITY
from shardwise.islands.island_exchange import IslandExchange
from shardwise.layout.bucket_layout import Bucket
from shardwise.layout.byte_ranges import extents
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import MemoryStorage, Span, Storage

OWN, MEAN = "own", "mean"


def set_name(kind: str, island: int) -> str:
    """The set in which island `island` keeps what is its own; the first one's optimizer state is
    where a run without islands has it."""
    if kind == ISLAND:
        return f"island-{island}"
    return f"island-{island}-optimizer" if kind == OPTIMIZER and island else kind


class BesideTensors(ExtraTensors):
    """Tensors that lie over the buckets beside the states, of which this rank has parts; `places`
    are by kind."""

    def __init__(self, parameters: Parameters, places: Mapping[str, Places]) -> None:
        self._parameters = parameters
        self._places = places

    @abstractmethod
    def _each(self) -> Iterator[tuple[str, str, int, Storage]]:
        """Kind, key, bucket and storage of all that is to be saved, or was."""

    @abstractmethod
    def _part(self, index: int) -> Span:
        """The elements of a bucket that this rank has."""

    @abstractmethod
    def _whole(self, index: int, part: Tensor) -> Tensor:
        """All of a bucket, from the parts of this island's ranks. Collective over it."""

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
        """By kind, the tensors that there are."""
        found: dict[str, list[TensorSpec]] = {ISLAND: [], OUTER: []}
        for kind, key, index, storage in self._each():
            for number, name in self._names(index, key).items():
                shape = tuple(self._parameters.named[number].whole_shape)
                found[kind].append(TensorSpec(name, dtype_name(storage.dtype), shape))
        return found

    def __iter__(self) -> Iterator[TensorSpan]:
        """All spans, bucket by bucket."""
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
        """Kind and name of what lies in memory in another order than that of its elements."""
        named = self._parameters.named
        return {
            (kind, name)
            for kind, key, index, _ in self._each()
            for number, name in self._names(index, key).items()
            if not named[number].in_order
        }

    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """The same tensors, flat in the order of their elements, whole on every rank. Collective
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
        """The names of the parameters of a bucket."""
        slots = self._bucket(index).slots
        return [self._parameters.named[slot.parameter].name for slot in slots]


class IslandTensors(BesideTensors):
    """The tensors of `islands` that this rank has, with anchor and weights in each other's place.

    `places` are by kind. With `moved` weights are not the anchor everywhere.
    """

    def __init__(
        self,
        parameters: Parameters,
        islands: IslandExchange,
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
                yield ISLAND, OWN, index, anchor.storages[VALUE][index]
            if RESIDUAL in anchor.keys:
                yield ISLAND, RESIDUAL, index, anchor.storages[RESIDUAL][index]
            if VELOCITY in anchor.keys:
                yield OUTER, VELOCITY, index, anchor.storages[VELOCITY][index]
            if index in flying:
                yield ISLAND, SENT, index, anchor.storages[SENT][index]
                yield OUTER, MEAN, index, MemoryStorage(self._islands.landed(index))

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Islands that have trained by themselves have other statistics.
        return {state_name(n, OWN): value for n, value in held.items()} if self.moved else {}

    def _part(self, index: int) -> Span:
        return self._islands.anchor.parts[index]

    def _whole(self, index: int, part: Tensor) -> Tensor:
        return self._islands.anchor.whole(index, part)

    # -- the numbers beside ------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """By parameter what the steps since its difference was sent have weighed, and at which step
        one is due that is on its way."""
        islands = self._islands
        buckets = range(islands.buckets)
        return {
            "weights": {n: islands.weights[i] for i in buckets for n in self._parameters_of(i)},
            "due": {n: islands.due[i] for i in islands.flying for n in self._parameters_of(i)},
        }

    def take_numbers(self, saved: Mapping[str, Any], step: int) -> None:
        """Go on with `saved` numbers at `step`; a difference that is due for a whole bucket, at a
        step at which this run uses it, is waited for."""
        for index in range(self._islands.buckets):
            names = self._parameters_of(index)
            self._islands.weights[index] = float(saved["weights"].get(names[0], 0.0))
            due = {saved["due"].get(name) for name in names}
            if len(due) == 1 and (when := due.pop()) is not None and when > step:
                self._islands.expect(index, int(when))
