"""Builds the anchor that islands have in common over the states, and takes it apart again."""

from __future__ import annotations

from shardwise.engine.engine_spec import EngineSpec
from shardwise.states.anchor import Anchor, Kept
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
    """The anchor by key and parameter, whole; what is on its way to other islands is dropped.
    Collective."""
    if islands is None:
        return None
    islands.forget()
    anchor = islands.anchor
    return {key: gathering.tensors(anchor.loaded(key)) for key in anchor.keys}
