"""Splits the sequences of batches that a library's loaders have read (`--context`).

The loaders of a context group read the same samples, and each rank takes its part of every
sequence:

    -n 4 --context 2, batches of 2 rows    rank            0    1    2    3
                                           samples read    0-1  0-1  2-3  2-3
                                           tokens          0-3  4-8  0-3  4-8      of 9
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.bridging.trained_engine import trained_engines
from shardwise.errors import DataError, UsageError
from shardwise.parallel.context.token_exchange import gather
from shardwise.world import sequence_parts
from shardwise.world.current_batch import Batch, StreamShape
from shardwise.world.sequence_parts import DIM, Sequences


@dataclass(frozen=True, eq=False)
class SplitBatch:
    """This rank's part of the sequences of a batch: the `values` that the script receives."""

    values: Any
    sequences: Sequences
    """The full sequences."""

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.sequences.rows


class SequenceBatches:
    """Splits batches, and describes them to the engine as `world.share` does.

    Args:
        world: The run.
        source: Name of the source of the batches in messages ("prepared loader").
    """

    def __init__(self, world: sw.World, source: str) -> None:
        self._world, self._source = world, source
        self._rank, self._size = world.context_rank, world.context_size
        self._lengths: list[int] = []
        """The length of each rank's part of the last batch that was shown."""

    def split(self, batch: Any) -> SplitBatch:
        """Return this rank's part of the sequences of `batch`. Collective.

        Raises DataError if the ranks of the context group have read different samples, or if the
        batch cannot be split.
        """
        values = sequence_parts.as_tree(batch)
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        self._check_same(tensors)
        return SplitBatch(*sequence_parts.cut(values, self._rank, self._size, call=self._source))

    def _check_same(self, tensors: list[Tensor]) -> None:
        # Attention would silently mix the sequences of different samples.
        if not self._are_equal(tensors):
            raise DataError(
                f"{self._source}: --context {self._size} gives each worker a part of the same "
                "sequences, but the workers of a context group have read different samples. Do not "
                "share the samples by rank in the script, and draw their order from the same seed "
                "on all workers."
            )

    def _are_equal(self, tensors: list[Tensor]) -> bool:
        """Return whether the `tensors` have the same bits on all ranks of the context group."""
        number = 0
        for each in tensors:
            number = zlib.crc32(repr((each.shape, each.dtype)).encode(), number)
            data = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            number = zlib.crc32(data.numpy().data, number)
        return len(set(self._world.context.gather_plain(number))) == 1

    def check_equal(self, values: Any, call: str) -> None:
        """Raise UsageError if `values` differ between the ranks of the context group. Collective.

        `call` is the caller's name, for messages.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        if not self._are_equal(tensors):
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
            raise UsageError(
                f"{call} got values of shape {shapes} that differ between workers with parts of "
                f"the same sequences (--context {self._size}), so they cannot be counted once per "
                "sample. Pass values per token of shape (rows, length, ...), which are joined; or "
                "add up the sums and the counts of all workers and divide afterwards."
            )

    def part_of(self, values: Tensor) -> Tensor:
        """Return this rank's part of `values` (rows, length, ...)."""
        part: Tensor = sequence_parts.cut(values, self._rank, self._size, call=self._source)[0]
        return part

    def show(self, batch: SplitBatch, samples: int, *, training: bool) -> Any:
        """Declare that the next forward pass runs on `batch`. Return its values.

        `samples` is the number of rows that count; 0 if all of them are repeated.
        """
        self._lengths = sequence_parts.lengths_of(batch.sequences.length, self._size)
        shape = StreamShape(batch_size=None, micro_batches=1, steps_per_epoch=None)
        # The other ranks' batches are unknown. They usually have the same number of rows.
        total = batch.rows * self._world.data_size
        given = Batch(samples=samples, total=total, sequence=batch.sequences)
        self._world.current_batch.share(self._source, shape, given, training=training)
        return batch.values

    def whole(self, values: Any, call: str | None = None) -> Any:
        """Return nested `values` with full sequences, joined from all ranks' parts. Collective.

        Only tensors are joined that are (rows, own length, ...) on every rank, for the batch that
        was shown last. With `call`, the caller's name for messages, they may also be values of
        another kind. Raises UsageError if such tensors are equal on all ranks, because they may
        then be values per sample.
        """
        if not self._lengths or not trained_engines():  # nothing is split without an engine
            return values
        leaves, nest = pytree.tree_flatten(values)
        group = self._world.context
        # Agree first, because a rank's own length may equal another dimension by chance.
        shapes = group.gather_plain(
            [list(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        )
        if len({len(each) for each in shapes}) > 1:
            raise UsageError(
                f"{call or self._source}: the workers of a context group have passed different "
                "numbers of values. Pass the same values on all workers."
            )
        for number, each in enumerate(zip(*shapes, strict=True)):
            if self._are_parts(each):
                self._check_different(leaves[number], call)
                leaves[number] = gather(leaves[number], DIM, self._lengths, group)
        return pytree.tree_unflatten(leaves, nest)

    def _are_parts(self, shapes: Sequence[list[int] | None]) -> bool:
        """Return whether tensors of these `shapes`, one per rank, fit the parts of a batch."""
        found = [each for each in shapes if each is not None and len(each) > DIM]
        return (
            len(found) == len(shapes)
            and [each[DIM] for each in found] == self._lengths
            and len({(*each[:DIM], *each[DIM + 1 :]) for each in found}) == 1
        )

    def _check_different(self, part: Tensor, call: str | None) -> None:
        # A constant, such as ignored labels, is often equal on all ranks.
        if call is None or not self._are_equal([part]):
            return
        if part.numel() and not bool((part == part.flatten()[0]).all()):
            raise UsageError(
                f"{call} got values of shape {tuple(part.shape)} that are equal on all workers "
                f"with parts of the same sequences (--context {self._size}), so it is unknown "
                "whether they are values per token, to be joined. Pass values per sample with "
                "another dimension: values.unsqueeze(1). Pass values per token together with "
                "their positions: torch.stack([values, positions], -1)."
            )
