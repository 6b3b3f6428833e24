"""Predicts how long collectives take over the links of a cluster.

In a reduce-scatter or all-gather, a ring of n ranks moves (n-1)/n of the bytes over each link, in
n-1 hops. An all-reduce takes twice as long (Patarasuk and Yuan, 2009). If a group has several ranks
on each of several hosts, the collective first runs within each host over the fast link. Each rank
then exchanges one slice with other hosts, and all ranks do so at once over their own network cards.
NCCL and this package's transports use the same hierarchy. A tree has fewer hops for the same number
of bytes, and is used if it is faster, as in NCCL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.tools.plan.catalogue import NetworkLink
from shardwise.tools.plan.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `inside` ranks on each of `hosts` hosts.

    Other groups on the same hosts may communicate at the same time. Every device has its own link,
    so the groups do not slow each other down.
    """

    inside: int
    hosts: int
    near: NetworkLink
    far: NetworkLink

    @property
    def ranks(self) -> int:
        return self.inside * self.hosts


def group_of(cluster: Cluster, ranks: int, stride: int) -> Group:
    """Return a group of `ranks` ranks whose rank numbers are `stride` apart.

    Ranks are assigned to hosts in order. The ranks of a tensor group (stride 1) are therefore
    adjacent, and the ranks of a data group are one replica apart.
    """
    # If the stride exceeds the number of devices per host, each rank is on a different host.
    inside = max(1, min(ranks, cluster.per_host // stride))
    return Group(inside, -(-ranks // inside), cluster.inside, cluster.between)


def reduce_scatter_seconds(count: float, group: Group) -> float:
    """Return the time in seconds to reduce-scatter a buffer of `count` bytes."""
    if group.ranks == 1 or not count:
        return 0.0
    # First reduce within each host. Then each rank exchanges its slice with the ranks on other
    # hosts that hold the same slice.
    near = _ring(count, group.inside, group.near)
    return near + _ring(count / group.inside, group.hosts, group.far)


all_gather_seconds = reduce_scatter_seconds
"""Return the time in seconds to all-gather a buffer of `count` bytes. An all-gather makes the same
transfers as a reduce-scatter, in reverse."""


def all_reduce_seconds(count: float, group: Group) -> float:
    """Return the time in seconds to all-reduce `count` bytes by ring or tree (the faster one)."""
    if group.ranks == 1 or not count:
        return 0.0
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    ring = 2 * reduce_scatter_seconds(count, group)
    near = 2 * _tree(count, group.inside, group.near)
    return min(ring, near + 2 * _tree(count / group.inside, group.hosts, group.far))


def all_to_all_seconds(count: float, group: Group) -> float:
    """Return the time in seconds of an all-to-all in which each rank distributes `count` bytes."""
    if group.ranks == 1 or not count:
        return 0.0
    # Each rank sends over its own links, to the ranks of its host and of other hosts at once.
    near, far = group.inside - 1, group.ranks - group.inside
    return max(
        near * (count / group.ranks / group.near.bandwidth + group.near.latency),
        far * (count / group.ranks / group.far.bandwidth + group.far.latency),
    )


def send_seconds(count: float, link: NetworkLink) -> float:
    """Return the time in seconds to send `count` bytes to another rank."""
    return link.latency + count / link.bandwidth if count else 0.0


def _ring(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * count / link.bandwidth + (ranks - 1) * link.latency


def _tree(count: float, ranks: int, link: NetworkLink) -> float:
    if ranks == 1:
        return 0.0
    return count / link.bandwidth + math.ceil(math.log2(ranks)) * link.latency
