"""Times of collectives over the links of a cluster.

A ring of n ranks moves (n-1)/n of the bytes over each link for a reduce-scatter or an all-gather,
and twice that for an all-reduce, in n-1 hops (Patarasuk and Yuan, 2009). If a group has several
ranks on each of several hosts, the part within a host uses the fast link. The hosts then exchange
one slice per rank, all at once over their network cards. NCCL and this package's transports use the
same hierarchical form. A tree has fewer hops and as many bytes, and is used if it is faster, as in
NCCL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.tools.plan.catalogue import NetworkLink
from shardwise.tools.plan.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `inside` of them on each of `hosts` hosts.

    Other groups may use the links of the same hosts at the same time. Links are per device, so the
    groups do not slow each other down.
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
    """Return the group of `ranks` ranks that are `stride` apart.

    Ranks fill hosts in order. So the ranks of a tensor group (stride 1) are neighbours, and the
    ranks of a data group are one replica apart.
    """
    # With a stride above the host's size every rank of the group is on its own host.
    inside = max(1, min(ranks, cluster.per_host // stride))
    return Group(inside, -(-ranks // inside), cluster.inside, cluster.between)


def reduce_scatter_seconds(count: float, group: Group) -> float:
    """Return the seconds to reduce `count` bytes in total to one shard per rank."""
    if group.ranks == 1 or not count:
        return 0.0
    # Inside each host first. Then each rank exchanges its slice with the ranks that hold the same
    # slice on other hosts.
    near = _ring(count, group.inside, group.near)
    return near + _ring(count / group.inside, group.hosts, group.far)


all_gather_seconds = reduce_scatter_seconds
"""Seconds to gather `count` bytes in total on each rank: the same transfers in reverse."""


def all_reduce_seconds(count: float, group: Group) -> float:
    """Return the seconds to sum `count` bytes on each rank, by a ring or a faster tree."""
    if group.ranks == 1 or not count:
        return 0.0
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    ring = 2 * reduce_scatter_seconds(count, group)
    near = 2 * _tree(count, group.inside, group.near)
    return min(ring, near + 2 * _tree(count / group.inside, group.hosts, group.far))


def send_seconds(count: float, link: NetworkLink) -> float:
    """Return the seconds to send `count` bytes to one other rank."""
    return link.latency + count / link.bandwidth if count else 0.0


def _ring(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * count / link.bandwidth + (ranks - 1) * link.latency


def _tree(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return count / link.bandwidth + math.ceil(math.log2(ranks)) * link.latency
