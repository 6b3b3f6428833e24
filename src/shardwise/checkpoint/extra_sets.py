"""Defines the hook through which a feature adds tensor sets and fields to checkpoints.

The hook is also called in runs that do not use the feature, so that they can load checkpoints from
runs that do.

    save    tensors ─▶ specs, spans, reordered    tensor sets
            fields                                fields of checkpoint.json
    load    select_sets                           chooses the sets and fields that this rank reads
            before_model ─▶ (the model is read) ─▶ after_model, or start_again

In this module, a *group* is the set of ranks that share one optimizer state. Without the feature,
this is all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import Places, StoredTensors

Sets = Mapping[str, TensorReader]
"""Readers of an opened checkpoint's tensor sets, by name."""


class ExtraTensors(ABC):
    """The tensors that a feature adds when a checkpoint is saved or loaded.

    Iterating over the object yields the spans that this rank holds.
    """

    @abstractmethod
    def specs(self) -> dict[str, list[TensorSpec]]:
        """Return the specs of the tensors in this rank's pipeline layers, by kind."""

    @abstractmethod
    def __iter__(self) -> Iterator[StoredTensors]:
        """Yield all of this rank's spans, bucket by bucket."""

    @abstractmethod
    def out_of_order(self) -> set[tuple[str, str]]:
        """Return (kind, name) of each tensor whose memory order differs from its element order."""

    @abstractmethod
    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, value) for each tensor in `out_of_order`.

        The values are full tensors in element order. Collective in the group.
        """

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that a group's first rank saves, by their names in the group's set.

        Args:
            held: All buffers of that rank, by name.
        """
        del held
        return {}


@dataclass(frozen=True)
class SetsToRead:
    """The sets and fields that a rank reads, named as if only its own group had written them.

    Args:
        sets: Readers of the tensor sets, by set name.
        fields: Fields of checkpoint.json.
        own: Model tensors that are read from a different set. Maps a tensor's name to the reader of
            that set and the tensor's name in it.
    """

    sets: Sets
    fields: Mapping[str, Any]
    own: Mapping[str, tuple[TensorReader, str]] = field(default_factory=dict)


class ExtraSets:
    """The sets and fields that a feature adds to checkpoints. This base class adds nothing.

    An engine uses the same object throughout, even if its states' layout changes.
    """

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        """Return the name of the set that holds the tensors of `kind` in group number `group`."""
        del group
        return kind

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        """Return the feature's current tensors, or None if the feature is not used. Collective.

        Args:
            places: This rank's position among the ranks that hold the same elements, by kind.
        """
        del places
        return None

    def fields(
        self, mine: Mapping[str, Any], gather_from_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        """Return additional fields for checkpoint.json. Collective.

        schema.py must define a check for each of them.

        Args:
            mine: The fields `state`, `borders` and `scaling` of this group.
            gather_from_layers: Gathers a value from the pipeline's ranks.
        """
        del mine, gather_from_layers
        return {}

    # -- loading --------------------------------------------------------------------------

    def select_sets(
        self, sets: Sets, fields: Mapping[str, Any], buffers: Set[str], *, model_only: bool
    ) -> SetsToRead:
        """Choose the sets and fields that this rank reads from a checkpoint.

        Args:
            sets: The checkpoint's sets, of all groups.
            fields: Fields of checkpoint.json. Empty for files from other libraries.
            buffers: Names of the model's buffers.
            model_only: True if optimizers and progress are not loaded.
        """
        del buffers, model_only
        return SetsToRead(sets, fields)

    def before_model(self) -> None:
        """Prepare for loading, before the model's tensors are read. Collective in each group."""

    def start_again(self) -> None:
        """Reset the feature's state after only the model has been loaded."""

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[StoredTensors]], None],
    ) -> None:
        """Restore the feature's tensors and scalars, after the model's tensors have been read.

        Args:
            source: The value that `select_sets` returned.
            step: Step of the checkpoint.
            places: Same as in `tensors`.
            fill: Fills the given spans from the checkpoint.
        """

    def notes(self, fields: Mapping[str, Any]) -> Iterable[str]:
        """Return messages for the user about state that loading changes or omits.

        Args:
            fields: Fields of checkpoint.json.
        """
        del fields
        return ()
