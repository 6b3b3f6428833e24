"""Adds micro-shards up in one tree, for the exact mode. Pure arithmetic.

The total batch is cut into micro-shards, the leaves. Neighbours are joined, from the left, by the
smallest prime factor first:

    12 micro-shards    0 + 1   2 + 3   4 + 5   6 + 7   8 + 9   10 + 11
    nodes of 2           └── + ──┘       └── + ──┘       └── + ──┘
    nodes of 4               └──────── + ────┴──── + ────────┘
    the root, of 12

N workers take them in turns, N neighbours at a time: in turn t rank r runs micro-shard t N + r.
Where N is the size of a node, what the ranks made in a turn sums up to that node, and the turns
to the nodes above it, so that the sum is the same tree on every such N. A power of two has nodes
of all its divisors. No tree over 6 has nodes of both 2 and 3 leaves: of the pairs that cover all
leaves, one crosses the border between two triples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwise.errors import ConfigError

T = TypeVar("T")


def fan_ins(leaves: int) -> list[int]:
    """How many nodes each level joins, from the leaves up: the prime factors, smallest first."""
    found, factor = [], 2
    while leaves > 1:
        while leaves % factor == 0:
            found.append(factor)
            leaves //= factor
        factor += 1
    return found


def node_sizes(leaves: int) -> list[int]:
    """The sizes of the tree's nodes in leaves, from 1 up to the whole."""
    sizes = [1]
    for fan_in in fan_ins(leaves):
        sizes.append(sizes[-1] * fan_in)
    return sizes


def fold(leaves: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The leaves, one at least, joined in the tree by `add`."""
    nodes = list(leaves)
    for fan_in in fan_ins(len(nodes)):
        nodes = [_from_left(nodes[i : i + fan_in], add) for i in range(0, len(nodes), fan_in)]
    return nodes[0]


def _from_left(nodes: Sequence[T], add: Callable[[T, T], T]) -> T:
    total = nodes[0]
    for node in nodes[1:]:
        total = add(total, node)
    return total


@dataclass(frozen=True)
class MicroShards:
    """The micro-shards of every total batch, `count` of them, among `workers`; this is `rank`.

    Raises ConfigError where as many workers cannot give the bits of the others.
    """

    count: int
    workers: int
    rank: int

    def __post_init__(self) -> None:
        sizes = node_sizes(self.count)
        if self.workers in sizes:
            return
        raise ConfigError(
            f"--exact {self.count} gives the same bits on {_listed(sizes)} workers, the nodes of "
            f"its tree of sums, and cannot run on {self.workers}. Start one of these numbers of "
            f"workers, or cut otherwise: --exact {self.workers} runs on {self.workers}."
        )

    @property
    def turns(self) -> int:
        """How many micro-shards each worker runs in a step, one after the other."""
        return self.count // self.workers

    @property
    def fan_ins(self) -> list[int]:
        """How the turns' sums are joined, level by level."""
        return fan_ins(self.count)[node_sizes(self.count).index(self.workers) :]

    def number(self, turn: int) -> int:
        """The micro-shard of turn `turn`."""
        return turn * self.workers + self.rank


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
