"""Lists the meshes that a script can use on a cluster: tensor x pipeline x data, and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.tools.plan.cluster import Cluster

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "gpipe")
"""The schedules. Equally fast ones are listed in this order."""

MOST_STAGES = 64
"""The largest number of ranks in a pipeline."""


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """`data` replicas of `tensor` x `pipeline` devices each, and the pipeline's schedule."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"


def tensor_sizes(cluster: Cluster) -> list[int]:
    """Return the numbers of ranks that may split each layer: powers of two within a host."""
    # Only within a host: a layer sums its output several times per step, too often for slow links.
    return [size for size in _powers(cluster.per_host) if cluster.devices % size == 0]


def pipeline_sizes(devices: int, layers: int) -> list[int]:
    """Return the numbers of pipeline stages of one replica on `devices` devices."""
    most = min(devices, layers, MOST_STAGES)
    return [size for size in _powers(most) if devices % size == 0]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length()) if 2**power <= most]


def meshes(cluster: Cluster, tensor: list[int], layers: int, total: int) -> Iterator[AxisSizes]:
    """Yield all meshes with one of the `tensor` sizes, and every pipeline that the model allows.

    `layers` is the number of layers, or 0 if the model can have no pipeline. `total` is the total
    batch, or 0 if each replica has its own batch. A mesh has at most `total` replicas.
    """
    for parts in tensor:
        devices = cluster.devices // parts
        for stages in pipeline_sizes(devices, max(layers, 1)):
            # A replica without a sample would be idle. Devices may stay unused instead.
            data = min(devices // stages, total) if total else devices // stages
            for schedule in schedules(stages, layers):
                yield AxisSizes(data=data, tensor=parts, pipeline=stages, schedule=schedule)


def schedules(stages: int, layers: int) -> tuple[str, ...]:
    """Return the schedules of a pipeline over `stages` ranks, for a model of `layers` layers."""
    if stages == 1:
        return SCHEDULES[:1]
    # Interleaved schedules have two stages per rank, and every stage needs a layer.
    return tuple(each for each in SCHEDULES if each != "interleaved" or 2 * stages <= layers)
