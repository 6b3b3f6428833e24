"""Declares what a checkpoint needs of the things that an engine is made from, and of its states.

The engine is a layer above and passes them in: `EngineSpec` and `States` in engine/.
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

# Properties, because an attribute of a protocol would have to be writable and of exactly that type.


class SpecView(Protocol):
    """What an engine is made from."""

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
    def steps_apart(self) -> bool:
        """Whether groups of ranks make updates of their own."""

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
        """Return the part of the whole tensor that `parameter` is; None if it is whole."""

    def is_here(self, parameter: Tensor) -> bool:
        """Return whether this rank trains `parameter`, or a part of it."""

    def runs(self, module: nn.Module) -> bool:
        """Return whether this rank runs `module`."""


class StatesView(Protocol):
    """The states of an engine, as they are laid out now."""

    @property
    def parameters(self) -> Parameters: ...
    @property
    def gradients(self) -> Gradients: ...
    @property
    def optimizer(self) -> OptimizerState: ...
    @property
    def averages(self) -> Averages | None: ...
