"""Times of collectives over the links of a cluster.

A ring of n ranks moves (n-1)/n of the bytes over each link for a reduce-scatter or an all-gather,
twice that for an all-reduce, in n-1 hops (Patarasuk and Yuan, 2009). Where a group spans hosts with
several ranks of it on each, the part inside a host goes over the fast link and the hosts exchange
what is left, a slice for each rank, all at once over their network cards: the hierarchical form
that NCCL and this package's transports use. A tree has fewer hops and as many bytes, and is taken
where it is faster, as NCCL does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.tools.plan.catalogue import NetworkLink
from shardwise.tools.plan.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: `inside` of them on each host, on `hosts` hosts.

    `sharing` groups of the same kind use a host's links at once, one for each of its other ranks;
    links are per device, so they do not slow each other.
    """

    inside: int
    hosts: int
    near: NetworkLink
    far: NetworkLink

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.inside * self.hosts


def group_of(cluster: Cluster, ranks: int, stride: int) -> Group:
    """The group of `ranks` ranks that are `stride` apart: ranks fill hosts in order, so those of a
    tensor group (stride 1) are neighbours, those of a data group a tensor group apart."""
    inside = max(1, min(ranks, cluster.per_host // stride))
    return Group(inside, -(-ranks // inside), cluster.inside, cluster.between)


def reduce_scatter_seconds(count: float, group: Group) -> float:
    """Seconds to reduce `count` bytes, the whole, to an interval for each rank."""
    if group.ranks == 1 or not count:
        return 0.0
    near = _ring(count, group.inside, group.near)
    return near + _ring(count / group.inside, group.hosts, group.far)


all_gather_seconds = reduce_scatter_seconds
"""Seconds to gather intervals to `count` bytes, the whole, on each rank: the same the other way."""


def all_reduce_seconds(count: float, group: Group) -> float:
    """Seconds to sum `count` bytes on each rank: a ring, or a tree where that is faster."""
    if group.ranks == 1 or not count:
        return 0.0
    ring = 2 * reduce_scatter_seconds(count, group)
    near = 2 * _tree(count, group.inside, group.near)
    return min(ring, near + 2 * _tree(count / group.inside, group.hosts, group.far))


def send_seconds(count: float, link: NetworkLink) -> float:
    """Seconds to send `count` bytes to one other rank."""
    return link.latency + count / link.bandwidth if count else 0.0


def _ring(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * count / link.bandwidth + (ranks - 1) * link.latency


def _tree(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return count / link.bandwidth + math.ceil(math.log2(ranks)) * link.latency
