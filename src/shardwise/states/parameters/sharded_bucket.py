"""Defines a bucket of sharded parameters. Each rank stores its own interval between steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.storage.storage import Storage


@dataclass(frozen=True, eq=False)
class ShardedBucket:
    """A bucket of sharded parameters, of which this rank stores one interval."""

    layout: Bucket
    named: tuple[NamedParameter, ...]
    """The parameter of each slot."""
    own: Span
    """This rank's interval, in elements of the bucket."""
    storage: Storage
    """Stores the values of that interval between steps."""
    common: Tensor | None
    """The full bucket of shape (numel,), if the ranks share memory."""

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameter object of each slot."""
        return [named.parameter for named in self.named]

    @cached_property
    def kind(self) -> tuple[int, torch.dtype, torch.device]:
        """Length in elements, dtype and device of the full bucket."""
        return self.layout.numel, self.named[0].dtype, self.named[0].device

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return, for each slot, the view of the full bucket `flat` in its parameter's layout."""
        pairs = zip(self.named, self.layout.slots, strict=True)
        return [named.view(flat, slot.start) for named, slot in pairs]

    def store(self, flat: Tensor) -> None:
        """Store this rank's interval of the full bucket `flat`."""
        self.storage.store(flat[self.own[0] : self.own[1]])

    def load(self, flat: Tensor) -> None:
        """Copy this rank's interval to its place in the full bucket `flat`."""
        self.storage.load(flat[self.own[0] : self.own[1]])

    def written(self, flat: Tensor) -> list[int]:
        """Return the indices of parameters whose values in `flat` differ from the stored ones.

        Compares only this rank's interval.
        """
        stored = torch.zeros_like(flat)
        self.load(stored)
        # Compare bytes, so that a NaN equals itself.
        now, before = flat.view(torch.uint8), stored.view(torch.uint8)
        size = flat.element_size()
        return [
            piece.parameter
            for piece in self.layout.pieces(*self.own)
            if not torch.equal(
                now[piece.start * size : piece.end * size],
                before[piece.start * size : piece.end * size],
            )
        ]
