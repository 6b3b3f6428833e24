"""Describes how a step is distributed: mesh axes, micro-batches and recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.placement import Placement
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import Group, group_of

REPLICATED = Placement()


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The sizes of the mesh axes, and the work of each rank per step.

    A tensor group's ranks are adjacent. The next ranks are the other stages of the same replica, as
    in mesh.py. `stages_per_rank` is 2 or more for interleaved schedules. `micros` is the number of
    micro-batches per step on each data rank, and `micro_batch` is the number of samples in each.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    micro_batch: int = 1
    micros: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    placement: Placement = REPLICATED
    overlap: bool = True
    """Whether gradients are reduced while the backward pass is still running."""

    blocking_sends: bool = False
    """Whether a rank stops computing while it sends to another stage, as in Megatron-LM."""

    stages_last: bool = False
    """Whether ranks are ordered as in Megatron-LM: the replicas of a stage are adjacent, and the
    stages of a replica are far apart."""

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """The global batch size in samples."""
        return self.data // self.context * self.micros * self.micro_batch

    def data_group(self, cluster: Cluster) -> Group:
        """Return a group of ranks that average gradients with each other."""
        stride = self.tensor if self.stages_last else self.tensor * self.pipeline
        return group_of(cluster, self.data, stride)

    def copies_group(self, cluster: Cluster) -> Group:
        """Return a group of ranks that hold the same experts."""
        return group_of(cluster, self.data * self.tensor // self.expert, self.expert)

    def expert_group(self, cluster: Cluster) -> Group:
        """Return a group of ranks that together hold every expert once."""
        return group_of(cluster, self.expert, 1)

    def context_group(self, cluster: Cluster) -> Group:
        """Return a group of ranks that hold parts of the same sequences."""
        stride = self.tensor if self.stages_last else self.tensor * self.pipeline
        return group_of(cluster, self.context, stride)

    def tensor_group(self, cluster: Cluster) -> Group:
        """Return a group of ranks that split each layer between them."""
        return group_of(cluster, self.tensor, 1)

    def stages_on_hosts(self, cluster: Cluster) -> bool:
        """Return whether all stages of a replica are on one host."""
        replica = self.devices if self.stages_last else self.tensor * self.pipeline
        return replica <= cluster.per_host
