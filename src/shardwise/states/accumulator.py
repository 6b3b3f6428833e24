"""How the gradients of a step become one sum: as they come, or in the exact mode's tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shardwise.states import exact_squares
from shardwise.states.storage import Held, Span
from shardwise.sum_tree import MicroShards


class Measure(Protocol):
    """Tells of the squares of what is held in a span of it."""

    def __call__(self, held: Held, own: Span, *, wide: bool = False) -> Tensor:
        """Rows of buckets and ranks add up; `wide` where squares of fp32 numbers overflow."""


@dataclass(frozen=True)
class Summation:
    """As they come: over micro-batches and then ranks, or the other way, whatever moves less."""

    in_tree: bool = False
    """Whether every backward's gradients are summed over the ranks, in the tree, before they meet
    those of other backwards."""
    fan_ins: Sequence[int] = ()
    """How the backwards' sums are joined then."""
    measure: Measure | None = None
    """What tells of the squares of a sum; None where they are added up while sums are made."""
    grain: int = 1
    """That of the layout's buckets."""


def in_tree(shards: MicroShards) -> Summation:
    """The summation whose bits are the same for every number of workers."""
    return Summation(True, shards.fan_ins, exact_squares.measure, exact_squares.GRAIN)
