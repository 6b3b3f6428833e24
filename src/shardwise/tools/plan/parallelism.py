"""The distribution of a step: data, tensor and pipeline axes, micro-batches, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.placement import Placement
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import Group, group_of

REPLICATED = Placement()


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The axes of a mesh, and the work of each rank in a step.

    Ranks of one tensor group are neighbours, then the stages of one replica, as in mesh.py.
    `stages_per_rank` is 2 or more for interleaved schedules. `micros` is the number of
    micro-batches of a step on each data rank, `micro_batch` the samples of one.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    micro_batch: int = 1
    micros: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    placement: Placement = REPLICATED
    overlap: bool = True
    """Whether gradients are reduced in parallel with backward."""

    blocking_sends: bool = False
    """Whether ranks wait while stages send to each other, as in Megatron-LM."""

    stages_last: bool = False
    """Whether ranks are ordered as in Megatron-LM: replicas of a stage are neighbours, and the
    stages of a replica are far apart."""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """The total batch in samples."""
        return self.data * self.micros * self.micro_batch

    def data_group(self, cluster: Cluster) -> Group:
        """Return the ranks that average gradients."""
        stride = self.tensor if self.stages_last else self.tensor * self.pipeline
        return group_of(cluster, self.data, stride)

    def tensor_group(self, cluster: Cluster) -> Group:
        """Return the ranks that split each layer."""
        return group_of(cluster, self.tensor, 1)

    def stages_on_hosts(self, cluster: Cluster) -> bool:
        """Return whether all stages of a replica are on one host."""
        replica = self.devices if self.stages_last else self.tensor * self.pipeline
        return replica <= cluster.per_host
