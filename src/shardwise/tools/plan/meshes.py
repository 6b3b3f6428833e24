"""Lists the meshes (data x tensor x pipeline) and schedules that a script can use on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.tools.plan.cluster import Cluster

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "gpipe")
"""The pipeline schedules. If two are equally fast, the earlier one is listed first."""

MOST_STAGES = 64
"""The largest number of pipeline ranks to try."""


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """The sizes of the mesh axes, and the pipeline schedule."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    expert: int = 1
    context: int = 1


def tensor_sizes(cluster: Cluster) -> list[int]:
    """Return the candidate tensor-parallel sizes: powers of two that fit on one host."""
    # Tensor groups stay within a host, because each layer all-reduces its output several times per
    # step. That is too often for slow links.
    return [size for size in _powers(cluster.per_host) if cluster.devices % size == 0]


def context_sizes(cluster: Cluster) -> list[int]:
    """Return the candidate context-parallel sizes: the tensor-parallel ones above 1."""
    return tensor_sizes(cluster)[1:]


def pipeline_sizes(devices: int, layers: int) -> list[int]:
    """Return the candidate pipeline sizes for `devices` devices and a model of `layers` layers."""
    most = min(devices, layers, MOST_STAGES)
    return [size for size in _powers(most) if devices % size == 0]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(most, 1).bit_length()) if 2**power <= most]


def meshes(
    cluster: Cluster,
    sizes: Sequence[tuple[int, int]],
    layers: int,
    total: int,
    experts: int = 0,
    beside_experts: Sequence[tuple[int, int]] = ((1, 1),),
) -> Iterator[AxisSizes]:
    """Yield every mesh with a pair of tensor- and context-parallel sizes in `sizes`.

    Yields one mesh for each pipeline schedule. `layers` is the number of layers, or 0 if the model
    cannot be split into pipeline stages. `total` is the global batch size, or 0 if each replica has
    its own batch. A mesh has at most `total` replicas, or context groups of replicas. `experts` is
    the smallest number of experts in any layer, or 0 if experts cannot be spread over ranks. Pairs
    of sizes are only combined with experts if they are in `beside_experts`.
    """
    for parts, context in sizes:
        devices = cluster.devices // parts // context
        for stages in pipeline_sizes(devices, max(layers, 1)):
            # A group without samples would have nothing to do, so leave its devices unused.
            groups = min(devices // stages, total) if total else devices // stages
            mesh = AxisSizes(data=groups * context, tensor=parts, pipeline=stages, context=context)
            yield from (replace(mesh, schedule=each) for each in schedules(stages, layers))
            if stages > 1 or (parts, context) not in beside_experts:
                continue
            ranks = mesh.data * parts
            for expert in _powers(min(ranks, experts))[1:]:
                # The ranks of a replica share its tokens out, so they hold different experts.
                if ranks % expert == 0 and expert % parts == 0:
                    yield replace(mesh, expert=expert)


def schedules(stages: int, layers: int) -> tuple[str, ...]:
    """Return the possible schedules for a model of `layers` layers on `stages` pipeline ranks."""
    if stages == 1:
        return SCHEDULES[:1]
    # Interleaved schedules have two stages per rank, and every stage needs at least one layer.
    return tuple(each for each in SCHEDULES if each != "interleaved" or 2 * stages <= layers)
