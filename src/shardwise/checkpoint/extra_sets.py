"""Hook for a feature that adds tensor sets and fields to a checkpoint.

A run without the feature uses it too, to load checkpoints of runs with the feature.

    save    tensors ─▶ specs, spans, reordered    the sets
            fields                                 fields of checkpoint.json
    load    select_sets                                which sets and fields this rank reads
            before_model ─▶ (the model is read) ─▶ after_model, or start_again

Here a *group* is the ranks that share one optimizer state; without the feature, all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import StoredTensors

Places = Mapping[bool, tuple[int, int]]
"""This rank's position among the ranks with the same elements, and their number. The key says
whether a rank has only a part of each tensor (tensor parallelism)."""

Sets = Mapping[str, TensorReader]
"""Readers of an opened checkpoint, by set."""


class ExtraTensors(ABC):
    """Tensors that a feature adds to one save or load.

    Iterating yields the spans that this rank holds.
    """

    @abstractmethod
    def specs(self) -> dict[str, list[TensorSpec]]:
        """Return the tensors of this rank's layers, by kind."""

    @abstractmethod
    def __iter__(self) -> Iterator[StoredTensors]:
        """Yield all spans, bucket by bucket."""

    @abstractmethod
    def out_of_order(self) -> set[tuple[str, str]]:
        """Return kind and name of tensors whose memory order differs from their element order."""

    @abstractmethod
    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind, name and value of these tensors, whole and in element order.

        Collective over the group.
        """

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that the first rank of a group saves, by their name in its set.

        Args:
            held: The buffers of that rank.
        """
        del held
        return {}


@dataclass(frozen=True)
class SetsToRead:
    """Sets and fields that a rank reads, in the form that its own group would have written.

    Args:
        own: Model tensors that are read from another set: reader, and name there, by name.
    """

    sets: Sets
    fields: Mapping[str, Any]
    own: Mapping[str, tuple[TensorReader, str]] = field(default_factory=dict)


class ExtraSets:
    """Additions of a feature to checkpoints. By default, methods add nothing.

    One object serves an engine even if its states are laid out again.
    """

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        """Return the name of the set of `kind` that belongs to group number `group`."""
        del group
        return kind

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        """Return the feature's present tensors, or None. Collective over all ranks.

        Args:
            places: This rank's place among the ranks with the same elements, by kind.
        """
        del places
        return None

    def fields(
        self, mine: Mapping[str, Any], gather_from_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        """Return additional fields of checkpoint.json; schema.py must list them. Collective.

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
        """Return the sets and fields that this rank reads, out of all groups' sets.

        Args:
            sets: All sets of the checkpoint.
            fields: Fields of checkpoint.json; empty for files of another library.
            buffers: Names of the model's buffers.
            model_only: True if optimizers and progress are not loaded.
        """
        del buffers, model_only
        return SetsToRead(sets, fields)

    def before_model(self) -> None:
        """Prepare a load, before the model's tensors are read. Collective over each group."""

    def start_again(self) -> None:
        """Reset the feature's state, if only the model was loaded."""

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[StoredTensors]], None],
    ) -> None:
        """Restore the feature's tensors and numbers, after the model's tensors are read.

        Args:
            source: The result of `select_sets`.
            step: Step of the checkpoint.
            places: As for `tensors`.
            fill: Reads the elements of spans from the checkpoint.
        """

    def notes(self, fields: Mapping[str, Any]) -> Iterable[str]:
        """Return messages for the user about changes and omissions of a load."""
        del fields
        return ()
