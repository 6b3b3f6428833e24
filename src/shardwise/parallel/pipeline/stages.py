"""Maps stages to ranks, and tracks the current StageRun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.errors import UsageError
from shardwise.parallel.pipeline.channels import Channels
from shardwise.parallel.pipeline.partition import Partition
from shardwise.parallel.pipeline.stage_tensors import StageRun


class Stages:
    """Maps the stages of a model to the ranks of `group`: stage s is on rank s % size."""

    partition: Partition

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.channels = Channels(group, self.rank_of)
        self.stages: frozenset[int] = frozenset()
        """The stages on this rank."""
        self.run = StageRun(self.stages)
        self.is_whole = False
        """True while this rank holds the full model, and modules run their own `forward`."""
        self.writes = False
        """True if changes to the gathered model are kept."""
        self.within_stage_depth = 0
        """Number of `within_stage` blocks that are currently open."""
        self._stage_of: dict[nn.Module, int] = {}

    def assign(self, partition: Partition) -> None:
        """Set the partition and this rank's stages."""
        self.partition = partition
        self._stage_of = {
            inner: partition.stage_of(number)
            for number, layer in enumerate(partition.layers)
            for inner in layer.module.modules()
        }
        # Assign stages round-robin, for interleaved schedules.
        self.stages = frozenset(range(self.group.rank, partition.stages, self.group.size))
        self.run = StageRun(self.stages)

    def rank_of(self, stage: int) -> int:
        """Return the rank in `group` that runs a stage."""
        return stage % self.group.size

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank trains `parameter`."""
        owner = self.partition.owners.get(parameter)  # type: ignore[call-overload]
        return owner is None or owner in self.stages

    def owner(self, parameter: Tensor) -> int | None:
        """Return the stage that trains a parameter, or None if it is not in the model."""
        return self.partition.owners.get(parameter)  # type: ignore[call-overload, no-any-return]

    def stage_of_module(self, module: nn.Module) -> int:
        """Return the stage that runs `module`, or its first part if several stages run it."""
        if (stage := self._stage_of.get(module)) is not None:
            return stage
        inside = set(module.modules())
        numbers = [n for n, layer in enumerate(self.partition.layers) if layer.module in inside]
        return self.partition.stage_of(min(numbers, default=0))

    def record_floating(self, module: nn.Module, stage: int) -> None:
        """Record that a module without parameters has run on stage `stage`."""
        for inner in module.modules():
            self._stage_of[inner] = stage

    @contextmanager
    def running(self, run: StageRun) -> Iterator[None]:
        """Context manager that makes `run` the current run of forward passes."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before

    @contextmanager
    def with_own_forwards(self) -> Iterator[None]:
        """Context manager that makes modules run their own `forward` instead of the replacement."""
        before, self.is_whole = self.is_whole, True
        try:
            with self.within_stage():
                yield
        finally:
            self.is_whole = before

    @contextmanager
    def within_stage(self) -> Iterator[None]:
        self.within_stage_depth += 1
        try:
            yield
        finally:
            self.within_stage_depth -= 1

    def new_path_error(self, source: int, target: int) -> UsageError:
        """Return the error to raise if a micro-batch takes a new path through the layers."""
        return UsageError(
            f"Stage {source} sends a value to stage {target} that it did not send in the first "
            "micro-batch. The model's forward must take the same path through its layers for every "
            "batch. Otherwise use a plain loop: loss = ...; engine.backward(loss)."
        )
