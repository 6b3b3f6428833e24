"""The step's time of a transformer given by formula, for published rows and for configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.plan.collectives import all_gather_seconds, all_reduce_seconds, group_of
from shardwise.tools.plan.operations import Busy, busy
from shardwise.tools.plan.parallelism import Parallelism
from shardwise.tools.plan.stages import Bytes, RankTime, UnitWork, step_times
from shardwise.tools.plan.transformer import FULL, SELECTIVE, Transformer


@dataclass(frozen=True)
class Software:
    """What a training system takes beside the device: seconds of the host for a layer's forward
    (backward takes twice that) and for each of its tensor-parallel collectives, and bytes of an
    element as it is stored, reduced and updated."""

    host: float = 0.0
    collective_host: float = 0.0
    size: Bytes = field(default_factory=Bytes)


def transformer_times(
    model: Transformer, run: Parallelism, cluster: Cluster, software: Software
) -> list[RankTime]:
    """The time of a step on each rank of the pipeline, by kind, in seconds."""
    stages = run.pipeline * run.stages_per_rank
    layer = _layer(model, run, cluster, software)
    units = [[layer] * count for count in _layers_of(model.layers, stages)]
    units[0].insert(0, _embedding(model, run, cluster))
    units[-1].append(_head(model, run, cluster))
    sbh = 2.0 * run.micro_batch * model.sequence / model.context * model.hidden
    boundary = sbh / run.tensor  # each tensor rank sends a part, and gathers inside its host
    return step_times(units, boundary, run, cluster, software.size)


def _layers_of(layers: int, stages: int) -> list[int]:
    """How many layers each stage has. Where it comes out even so, the embedding and the head count
    as a layer each, as Llama 3's do."""
    if stages > 1 and (layers + 2) % stages == 0:
        counts = [(layers + 2) // stages] * stages
        return [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def step_seconds(times: list[RankTime]) -> float:
    """The step, which all ranks end together."""
    return max(sum(each.by_kind.values()) for each in times)


def _layer(model: Transformer, run: Parallelism, cluster: Cluster, software: Software) -> UnitWork:
    device, b, t = cluster.device, run.micro_batch, run.tensor
    sequence_parallel = run.sequence_parallel
    forward = busy(model.forward(b, t, sequence_parallel=sequence_parallel), device)
    backward = busy(model.backward(b, t, sequence_parallel=sequence_parallel), device)
    tokens = b * model.sequence / model.context
    whole, group = 2.0 * tokens * model.hidden, run.tensor_group(cluster)
    if sequence_parallel:
        each = 2 * all_gather_seconds(whole, group)  # and a reduce-scatter of as many bytes
    else:
        each = all_reduce_seconds(whole, group)
    keys = 4.0 * b * model.sequence * model.key_values / t  # and values, 16-bit
    context = all_gather_seconds(keys, group_of(cluster, model.context, t))
    host = software.host + (2 * software.collective_host if t > 1 else 0.0)
    passes = 2  # backward is two forwards' worth for the host
    if run.recompute == FULL:
        backward, passes = backward + forward, passes + 1
    elif run.recompute == SELECTIVE:
        backward += busy(model.attention(b, t), device)
    spent = (4 if run.recompute == FULL else 2) * each
    return UnitWork(
        _hosted(forward, host, 2 * each),
        _hosted(backward, passes * host, spent),
        model.layer_parameters / t,
        2 * each + context,
        spent + 2 * context,  # gathered again, and their gradients scattered
    )


def _hosted(work: Busy, host: float, beside: float) -> Busy:
    """A row of operations that the host takes `host` seconds to start, at least; the device also
    has `beside` seconds of collectives among them."""
    return replace(work, launch=max(work.launch, host - work.matmul - work.memory - beside))


def _embedding(model: Transformer, run: Parallelism, cluster: Cluster) -> UnitWork:
    tokens = run.micro_batch * model.sequence / model.context
    forward = Busy(memory=6.0 * tokens * model.hidden / cluster.device.bandwidth)
    return UnitWork(forward, forward.times(2), model.vocabulary * model.hidden / run.tensor)


def _head(model: Transformer, run: Parallelism, cluster: Cluster) -> UnitWork:
    work = busy(model.head(run.micro_batch, run.tensor), cluster.device)
    held = model.gated or run.pipeline > 1  # else it is the embedding's own matrix
    parameters = model.vocabulary * model.hidden / run.tensor if held else 0.0
    return UnitWork(work, work.times(2), parameters)
