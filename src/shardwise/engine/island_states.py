"""Builds what islands have beside the states, and takes it apart again.

That is the anchor that they have in common, or what delays gradients where they make those equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor, nn

from shardwise.engine import island_report
from shardwise.engine.engine_spec import EngineSpec
from shardwise.islands.anchor import VALUE, Anchor, Kept
from shardwise.islands.delayed_sums import DelayedSums
from shardwise.islands.island_exchange import IslandExchange
from shardwise.islands.wire import Wire
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage_factory import StorageFactory

WEIGHT = "weight"
"""The key of what is kept beside the anchor: by parameter what steps have weighed since its
difference was sent."""


def build(
    spec: EngineSpec,
    parameters: Parameters,
    optimizer: OptimizerState,
    factory: StorageFactory,
    start: Kept | None,
) -> IslandExchange | None:
    """What keeps islands equal, their anchor from `start` on; None where they have no weights of
    their own."""
    if not spec.steps_apart:
        return None
    anchor = Anchor(
        parameters,
        optimizer,
        spec.settings.island_rule,
        factory,
        spec.shard_group,
        scattered=spec.placement.is_sharded("optimizer"),
        start=start,
    )
    islands = IslandExchange(anchor, spec.peers, begun=start is not None)
    _go_on(islands, parameters, (start or {}).get(WEIGHT, {}))
    return islands


def delay(
    spec: EngineSpec, parameters: Parameters, gradients: Gradients, factory: StorageFactory
) -> DelayedSums | None:
    """What delays `gradients` where islands make them equal; None where they do not. What was on
    its way in an earlier layout is dropped."""
    if spec.staleness is None:
        return None
    return DelayedSums(
        parameters,
        gradients,
        Wire(spec.staleness.wire),
        factory,
        spec.shard_group,
        spec.peers,
        spec.world_group,
        spec.staleness.behind,
        island_report.length(len(parameters.named)),
        scattered=spec.placement.is_sharded("optimizer"),
    )


def _go_on(
    islands: IslandExchange, parameters: Parameters, weights: Mapping[nn.Parameter, Tensor]
) -> None:
    """Count on from the `weights` of an earlier layout, by parameter."""
    for index, bucket in enumerate(parameters.buckets):
        several = [parameters.named[slot.parameter].parameter for slot in bucket.slots]
        known = [float(weights[parameter]) for parameter in several if parameter in weights]
        islands.weights[index] = max(known, default=0.0)


def anchored(kept: Kept | None) -> Set[nn.Parameter]:
    """The parameters that islands have something in common of."""
    return set() if kept is None else set(kept[VALUE])


def take_apart(
    islands: IslandExchange | None, parameters: Parameters, gathering: IntervalGather
) -> Kept | None:
    """The anchor by key and parameter, whole, and what steps have weighed since; what is on its way
    to other islands is dropped. None before the first step: islands begin at the weights then.
    Collective."""
    if islands is None or not islands.begun:
        return None
    islands.forget()
    anchor = islands.anchor
    weights = {
        parameters.named[slot.parameter].parameter: torch.tensor(weight, dtype=torch.float64)
        for bucket, weight in zip(parameters.buckets, islands.weights, strict=True)
        for slot in bucket.slots
    }
    return {WEIGHT: weights} | {k: gathering.tensors(anchor.loaded(k)) for k in anchor.keys}


def drop(delayed: DelayedSums | None) -> None:
    """Let gradients that are on their way be used by nobody, since they are laid out as before."""
    if delayed is not None:
        delayed.forget()


def leave_equal(kept: Kept | None, optimized: Set[nn.Parameter]) -> None:
    """Give parameters that no optimizer has any more, so that nothing makes them equal, the value
    that islands last had in common: each has had another since."""
    for parameter in anchored(kept) - optimized:
        assert kept is not None
        parameter.detach().copy_(kept[VALUE][parameter])


def rest_on_anchor(islands: IslandExchange | None) -> None:
    """Let the weights be what islands last had in common: what each has done since is dropped, and
    so is what is on its way. Collective over each island."""
    if islands is not None and islands.begun:
        islands.forget()
        with torch.no_grad():
            islands.anchor.swap()
