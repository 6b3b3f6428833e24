"""Builds the anchor that islands have in common over the states, and takes it apart again."""

from __future__ import annotations

from collections.abc import Set

from torch import nn

from shardwise.engine.engine_spec import EngineSpec
from shardwise.states.anchor import VALUE, Anchor, Kept
from shardwise.states.interval_gather import IntervalGather
from shardwise.states.island_exchange import IslandExchange
from shardwise.states.optimizer_state import OptimizerState
from shardwise.states.parameters import Parameters
from shardwise.states.storage_factory import StorageFactory


def build(
    spec: EngineSpec,
    parameters: Parameters,
    optimizer: OptimizerState,
    factory: StorageFactory,
    start: Kept | None,
) -> IslandExchange | None:
    """What keeps islands equal, their anchor from `start` on; None where there is one island."""
    if not spec.has_islands:
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
    return IslandExchange(anchor, spec.peers, begun=start is not None)


def take_apart(islands: IslandExchange | None, gathering: IntervalGather) -> Kept | None:
    """The anchor by key and parameter, whole; what is on its way to other islands is dropped. None
    before the first step: islands begin at the weights then. Collective."""
    if islands is None or not islands.begun:
        return None
    islands.forget()
    anchor = islands.anchor
    return {key: gathering.tensors(anchor.loaded(key)) for key in anchor.keys}


def leave_equal(kept: Kept | None, training: Set[nn.Parameter]) -> None:
    """Let parameters that are `training` no longer be what islands have in common of them: each
    island has another value since, and nothing would make these equal again."""
    for parameter, value in ({} if kept is None else kept[VALUE]).items():
        if parameter not in training:
            parameter.detach().copy_(value)
