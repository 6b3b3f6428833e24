"""A bucket of sharded parameters: the interval that one rank stores between steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.layout.bucket_layout import Bucket
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.storage.storage import Storage


@dataclass(frozen=True, eq=False)
class ShardedBucket:
    """A bucket of which this rank stores its interval; where ranks share memory, all of it."""

    layout: Bucket
    named: tuple[NamedParameter, ...]
    """By slot."""
    own: tuple[int, int]
    storage: Storage
    common: Tensor | None

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """By slot."""
        return [named.parameter for named in self.named]

    @cached_property
    def kind(self) -> tuple[int, torch.dtype, torch.device]:
        """Length, dtype and device of the whole bucket."""
        return self.layout.numel, self.named[0].dtype, self.named[0].device

    def views(self, flat: Tensor) -> list[Tensor]:
        """By slot, its parameter in `flat`, a whole bucket."""
        pairs = zip(self.named, self.layout.slots, strict=True)
        return [named.view(flat, slot.start) for named, slot in pairs]

    def store(self, flat: Tensor) -> None:
        """Take this rank's interval out of `flat`, a whole bucket."""
        self.storage.store(flat[self.own[0] : self.own[1]])

    def load(self, flat: Tensor) -> None:
        """Put this rank's interval into `flat`, a whole bucket."""
        self.storage.load(flat[self.own[0] : self.own[1]])

    def written(self, flat: Tensor) -> list[int]:
        """The parameters whose part of this rank's interval is another in `flat`."""
        was = torch.zeros_like(flat)
        self.load(was)
        return [
            piece.parameter
            for piece in self.layout.pieces(*self.own)
            if not _same_bits(flat[piece.start : piece.end], was[piece.start : piece.end])
        ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors of one dtype are the same, NaN for NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
