"""Protocols for the parts of an engine's specification and states that a checkpoint uses.

The engine is in a layer above and passes in its `EngineSpec` and `States`.
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

# Properties: a plain attribute of a protocol must be writable and have exactly the same type.


class SpecView(Protocol):
    """Models, optimizers, settings and groups of ranks of an engine."""

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
    def has_separate_steps(self) -> bool:
        """True if groups of ranks make separate updates (islands)."""

    # Groups of ranks, as in engine/engine_spec.py.
    @property
    def world_group(self) -> Collectives: ...
    @property
    def shard_group(self) -> Collectives: ...
    @property
    def stage_group(self) -> Collectives: ...
    @property
    def step_group(self) -> Collectives: ...
    @property
    def peers(self) -> Collectives: ...
    @property
    def apart(self) -> Collectives: ...

    def located(self) -> list[NamedParameter]:
        """Return every parameter of the models and optimizers."""

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """Return the part of a whole tensor that `parameter` is; None if it is whole."""

    def is_here(self, parameter: Tensor) -> bool:
        """Return whether this rank trains `parameter` or a part of it."""

    def runs(self, module: nn.Module) -> bool:
        """Return whether this rank runs `module`."""


class StatesView(Protocol):
    """The states of an engine in their present layout."""

    @property
    def parameters(self) -> Parameters: ...
    @property
    def gradients(self) -> Gradients: ...
    @property
    def optimizer(self) -> OptimizerState: ...
    @property
    def averages(self) -> Averages | None: ...
