"""Defines the tree in which the exact mode adds up micro-shards. Pure arithmetic.

The global batch is split into micro-shards, which are the leaves of the tree. Neighbours are added
from left to right, in groups whose size is the smallest prime factor of their number:

    12 micro-shards    0 + 1   2 + 3   4 + 5   6 + 7   8 + 9   10 + 11
    nodes of 2           └── + ──┘       └── + ──┘       └── + ──┘
    nodes of 4               └──────── + ────┴──── + ────────┘
    the root, of 12

N workers run N neighbouring micro-shards at a time: in turn t, rank r runs micro-shard t N + r.

If N is the size of a node, the results of one turn add up to that node, and the turns add up to the
nodes above it. The sum therefore has the same tree for every such N. If the number of leaves is a
power of two, all its divisors are node sizes. No tree over 6 leaves has nodes of both 2 and 3
leaves, because one of the pairs would straddle the boundary between two triples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from shardwise.errors import ConfigError

T = TypeVar("T")


def fan_ins(leaves: int) -> list[int]:
    """Return the fan-in of each level, from the leaves up: the sorted prime factors of `leaves`."""
    factors, factor = [], 2
    while leaves > 1:
        while leaves % factor == 0:
            factors.append(factor)
            leaves //= factor
        factor += 1
    return factors


def node_sizes(leaves: int) -> list[int]:
    """Return the sizes of the tree's nodes, in leaves, from a single leaf to the root."""
    sizes = [1]
    for fan_in in fan_ins(leaves):
        sizes.append(sizes[-1] * fan_in)
    return sizes


def fold(leaves: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Combine one or more leaves with `add`, in the order of the tree."""
    nodes = list(leaves)
    for fan_in in fan_ins(len(nodes)):
        # Add from the left, as `sum_in_rank_order` does across ranks: the order changes the
        # rounding.
        nodes = [reduce(add, nodes[i : i + fan_in]) for i in range(0, len(nodes), fan_in)]
    return nodes[0]


@dataclass(frozen=True)
class MicroShards:
    """This worker's view of the `count` micro-shards of every global batch.

    `workers` workers share the micro-shards, and this worker is number `rank`. Raises ConfigError
    if this number of workers cannot give bit-identical results.
    """

    count: int
    workers: int
    rank: int

    def __post_init__(self) -> None:
        sizes = node_sizes(self.count)
        if self.workers in sizes:
            return
        *first, last = map(str, sizes)
        listed = f"{', '.join(first)} and {last}" if first else last
        raise ConfigError(
            f"--exact {self.count} gives the same bits on {listed} workers, the sizes of the "
            f"nodes of its tree of sums, but cannot run on {self.workers}. Start one of these "
            f"numbers of workers, or use --exact {self.workers}, which runs on {self.workers}."
        )

    @property
    def turns(self) -> int:
        """Number of micro-shards that each worker runs in sequence per step."""
        return self.count // self.workers

    @property
    def fan_ins(self) -> list[int]:
        """Number of nodes added up into one, for each tree level above a turn, lowest first."""
        return fan_ins(self.count)[node_sizes(self.count).index(self.workers) :]

    def number(self, turn: int) -> int:
        """Return the index of the micro-shard that this worker runs in turn `turn`."""
        return turn * self.workers + self.rank
