"""Lists the meshes of a cluster that a script can have: tensor x pipeline x data, and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.tools.plan.cluster import Cluster

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "gpipe")
"""In the order in which equals are listed."""

MOST_STAGES = 64
"""Workers of one pipeline, at most."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """`data` replicas, each over `tensor` x `pipeline` devices; `schedule` is of the pipeline."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"


def tensor_sizes(cluster: Cluster) -> list[int]:
    """Numbers of ranks that may split each layer: powers of two, inside of a host."""
    return [size for size in _powers(cluster.per_host) if cluster.devices % size == 0]


def pipeline_sizes(devices: int, layers: int) -> list[int]:
    """Numbers of pipeline stages of one replica on so many `devices`."""
    most = min(devices, layers, MOST_STAGES)
    return [size for size in _powers(most) if devices % size == 0]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length()) if 2**power <= most]


def meshes(cluster: Cluster, tensor: list[int], layers: int, total: int) -> Iterator[Mesh]:
    """All meshes with one of the `tensor` sizes and, for a model of `layers` layers, 0 where it can
    have no pipeline, all pipelines; no more replicas than the batch has samples, `total` (0 where
    each replica takes a batch of its own)."""
    for parts in tensor:
        devices = cluster.devices // parts
        for stages in pipeline_sizes(devices, max(layers, 1)):
            data = min(devices // stages, total) if total else devices // stages
            for schedule in schedules(stages, layers):
                yield Mesh(data=data, tensor=parts, pipeline=stages, schedule=schedule)


def schedules(stages: int, layers: int) -> tuple[str, ...]:
    """The schedules of a pipeline over so many ranks, of a model of `layers` layers."""
    if stages == 1:
        return SCHEDULES[:1]
    return tuple(each for each in SCHEDULES if each != "interleaved" or 2 * stages <= layers)
