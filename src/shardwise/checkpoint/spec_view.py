"""Defines protocols for the parts of an engine's specification and states that checkpoints use.

The engine is in a higher layer, which this package must not import. EngineSpec implements
`SpecView`, and States implements `StatesView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn, optim

from shardwise.comm import Collectives
from shardwise.config import Settings
from shardwise.layout.placement import Placement
from shardwise.layout.shards import Shard
from shardwise.parallel.pipeline import PipelineGroup
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.ema import Averages
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.shard_groups import ShardGroups

# The protocols use properties, because a plain attribute would have to be writable and of exactly
# the same type in every implementation.


class SpecView(Protocol):
    """An engine's models, optimizers, settings and groups of ranks."""

    @property
    def models(self) -> Sequence[nn.Module]: ...
    @property
    def optimizers(self) -> Sequence[optim.Optimizer]: ...
    @property
    def prefixes(self) -> Sequence[str]: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def pipeline(self) -> PipelineGroup | None: ...
    @property
    def pipeline_rank(self) -> int: ...
    @property
    def tensor_rank(self) -> int: ...
    @property
    def expert_rank(self) -> int: ...

    @property
    def has_separate_steps(self) -> bool:
        """Whether groups of ranks (islands) update their weights separately."""

    # Groups of ranks, described in engine/engine_spec.py.
    @property
    def world_group(self) -> Collectives: ...
    @property
    def shard_group(self) -> Collectives: ...
    @property
    def shard_groups(self) -> ShardGroups: ...
    @property
    def stage_group(self) -> Collectives: ...
    @property
    def step_group(self) -> Collectives: ...
    @property
    def peers(self) -> Collectives: ...
    @property
    def apart(self) -> Collectives: ...

    def located(self) -> list[NamedParameter]:
        """Return all parameters of the models and optimizers, with their names."""

    def axis_of(self, parameter: Tensor) -> str:
        """Return the mesh axis along which the bucket of `parameter` is sharded."""

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """Return which part of the full tensor `parameter` is, or None if it is not split."""

    def state_shard_of(self, parameter: nn.Parameter, key: str, value: Tensor) -> Shard | None:
        """Return which part of a full tensor `value`, entry `key` of `parameter`'s state, is."""

    def is_here(self, parameter: Tensor) -> bool:
        """Return whether this rank holds `parameter` or a part of it."""

    def runs(self, module: nn.Module) -> bool:
        """Return whether `module` is on this rank's pipeline stage."""


class StatesView(Protocol):
    """An engine's states in their current layout."""

    @property
    def parameters(self) -> Parameters: ...
    @property
    def gradients(self) -> Gradients: ...
    @property
    def optimizer(self) -> OptimizerState: ...
    @property
    def averages(self) -> Averages | None: ...
