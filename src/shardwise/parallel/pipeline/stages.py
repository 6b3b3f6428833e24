"""Maps stages to ranks, and tracks what this rank runs at present."""

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
    """The stages of a model over the ranks of `group`: stage s is on rank s % size."""

    partition: Partition

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.channels = Channels(group, self.rank_of)
        self.stages: frozenset[int] = frozenset()
        """The stages on this rank."""
        self.run = StageRun(self.stages)
        self.is_whole = False
        """Whether this rank has the whole model at present, so that forwards are the modules'
        own."""
        self.writes = False
        """Whether writes into the whole model are kept."""
        self.within_stage_depth = 0
        """The number of open blocks of `within_stage`."""
        self._stage_of: dict[nn.Module, int] = {}

    def assign(self, partition: Partition) -> None:
        """Set the partition, and with it the stages of this rank."""
        self.partition = partition
        self._stage_of = {
            inner: partition.stage_of(number)
            for number, layer in enumerate(partition.layers)
            for inner in layer.module.modules()
        }
        self.stages = frozenset(range(self.group.rank, partition.stages, self.group.size))
        self.run = StageRun(self.stages)

    def rank_of(self, stage: int) -> int:
        """The rank of `group` that has a stage."""
        return stage % self.group.size

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank trains `parameter`."""
        owner = self.partition.owners.get(parameter)  # type: ignore[call-overload]
        return owner is None or owner in self.stages

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter; None for one that is not the model's."""
        return self.partition.owners.get(parameter)  # type: ignore[call-overload, no-any-return]

    def stage_of_module(self, module: nn.Module) -> int:
        """The stage that runs `module`, or the first one that runs a part of it."""
        if (found := self._stage_of.get(module)) is not None:
            return found
        inside = set(module.modules())
        numbers = [n for n, layer in enumerate(self.partition.layers) if layer.module in inside]
        return self.partition.stage_of(min(numbers, default=0))

    def record_floating(self, module: nn.Module, stage: int) -> None:
        """Record that a module without parameters has run on `stage`, where its input was."""
        for inner in module.modules():
            self._stage_of[inner] = stage

    @contextmanager
    def running(self, run: StageRun) -> Iterator[None]:
        """Run forwards as part of `run` inside the block."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before

    @contextmanager
    def with_own_forwards(self) -> Iterator[None]:
        """Run the modules' own forwards inside the block."""
        before, self.is_whole = self.is_whole, True
        try:
            with self.within_stage():
                yield
        finally:
            self.is_whole = before

    @contextmanager
    def within_stage(self) -> Iterator[None]:
        """Mark operations inside the block as those of one stage, so that none is sent
        elsewhere."""
        self.within_stage_depth += 1
        try:
            yield
        finally:
            self.within_stage_depth -= 1

    def new_path_error(self, source: int, target: int) -> UsageError:
        """The error for a batch that takes another path through the layers than the first."""
        return UsageError(
            f"Stage {source} has something for stage {target} that it did not have in the first "
            "micro-batch. Let the model's forward take the same way through its layers for every "
            "batch, or use a plain loop: loss = ...; engine.backward(loss)."
        )
