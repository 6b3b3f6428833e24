"""Defines the hook by which a feature adds tensor sets and fields to a checkpoint.

A run without such a feature uses it too, to load checkpoints that a run with the feature wrote.

    save    tensors ─▶ specs, spans, reordered    the sets
            fields                                 entries of checkpoint.json
    load    read_as                                which sets and fields this rank reads
            before_model ─▶ (the model is read) ─▶ after_model, or start_again

A *group* here is the ranks that share one optimizer state; without the feature, all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.reader import TensorReader
from shardwise.checkpoint.tensor_spans import TensorSpan

Places = Mapping[bool, tuple[int, int]]
"""Number of this rank among the ranks with the same elements, and how many they are. By whether a
rank has only a part of each tensor (tensor parallelism)."""

Sets = Mapping[str, TensorReader]
"""Tensors of an opened checkpoint, by the name of the set."""


class ExtraTensors(ABC):
    """Tensors that a feature keeps next to model and optimizer, at the moment of one save or load.

    Iterating yields the spans that this rank holds.
    """

    @abstractmethod
    def specs(self) -> dict[str, list[TensorSpec]]:
        """Return by kind the tensors of this rank's layers."""

    @abstractmethod
    def __iter__(self) -> Iterator[TensorSpan]:
        """Yield all spans, bucket by bucket."""

    @abstractmethod
    def out_of_order(self) -> set[tuple[str, str]]:
        """Return kind and name of tensors whose memory is not in the order of their elements."""

    @abstractmethod
    def reordered(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind, name and value of these tensors in the order of their elements, whole.

        Collective over the group.
        """

    def buffers(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is saved of the buffers `held` by the first rank of this group, by the name
        in the group's own set."""
        del held
        return {}


@dataclass(frozen=True)
class SetsToRead:
    """What a rank reads of a checkpoint: sets and fields, as if its own group had written them.

    Args:
        own: Tensors of the model that are read from another set, by name: reader and name there.
    """

    sets: Sets
    fields: Mapping[str, Any]
    own: Mapping[str, tuple[TensorReader, str]] = field(default_factory=dict)


class ExtraSets:
    """What a feature adds to checkpoints. Each method adds nothing unless a subclass overrides it.

    One object serves an engine through all layouts of its states.
    """

    # -- saving ---------------------------------------------------------------------------

    def set_name(self, kind: str, group: int) -> str:
        """Return the set in which group number `group` keeps its tensors of `kind`."""
        del group
        return kind

    def tensors(self, places: Mapping[str, Places]) -> ExtraTensors | None:
        """Return the tensors that there are now, None without any. Collective over all ranks.

        Args:
            places: By kind, this rank's place among the ranks with the same elements.
        """
        del places
        return None

    def fields(
        self, mine: Mapping[str, Any], of_all_layers: Callable[[Any], list[Any]]
    ) -> dict[str, Any]:
        """Return further fields of checkpoint.json; schema.py lists them. Collective.

        Args:
            mine: The fields `state`, `borders` and `scaling` of this group.
            of_all_layers: Gathers a value from the ranks that share out the layers.
        """
        del mine, of_all_layers
        return {}

    # -- loading --------------------------------------------------------------------------

    def read_as(
        self, sets: Sets, fields: Mapping[str, Any], buffers: Set[str], *, model_only: bool
    ) -> SetsToRead:
        """Return the sets and fields that this rank reads, out of those of all groups.

        Args:
            sets: All sets of the checkpoint.
            fields: Fields of checkpoint.json; empty for files of another library.
            buffers: The names of the model's buffers.
            model_only: Whether optimizers and progress are not loaded.
        """
        del buffers, model_only
        return SetsToRead(sets, fields)

    def before_model(self) -> None:
        """Called before the model's tensors are read. Collective over each group."""

    def start_again(self) -> None:
        """Called after the model's tensors if nothing else is loaded."""

    def after_model(
        self,
        source: SetsToRead,
        step: int,
        places: Mapping[str, Places],
        fill: Callable[[Iterable[TensorSpan]], None],
    ) -> None:
        """Restore the feature's tensors and numbers, once the model's tensors are read.

        Args:
            source: What `read_as` returned.
            step: Step of the checkpoint.
            places: As for `tensors`.
            fill: Reads the elements of spans from the checkpoint.
        """

    def notes(self, fields: Mapping[str, Any]) -> Iterable[str]:
        """Return lines for the user about what a load changes or leaves out."""
        del fields
        return ()
