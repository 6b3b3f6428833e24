"""Which stage is on which rank, what this one has, and what it runs now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives
from shardwise.errors import UsageError
from shardwise.parallel.pipeline.channels import Channels
from shardwise.parallel.pipeline.partition import Cut
from shardwise.parallel.pipeline.stage_tensors import Run


class Stages:
    """The stages of a model over the ranks of `group`: stage s is on rank s % size."""

    cut: Cut

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.channels = Channels(group, self.rank_of)
        self.stages: frozenset[int] = frozenset()
        """Those of this rank."""
        self.run = Run(self.stages)
        self.is_whole = False
        """Whether this rank has the whole model for now, so that forwards are the plain ones."""
        self.writes = False
        """Whether what is written into it then is taken in."""
        self.inside_of = 0
        """Of how many blocks `inside` this is."""
        self._stage_of: dict[nn.Module, int] = {}

    def share(self, cut: Cut) -> None:
        """Know which stage has what. Collective."""
        self.cut = cut
        self._stage_of = {
            inner: cut.stage_of(number)
            for number, atom in enumerate(cut.atoms)
            for inner in atom.module.modules()
        }
        self.stages = frozenset(range(self.group.rank, cut.stages, self.group.size))
        self.run = Run(self.stages)

    def rank_of(self, stage: int) -> int:
        """The rank of `group` that has a stage."""
        return stage % self.group.size

    def has(self, parameter: Tensor) -> bool:
        """Whether this rank trains `parameter`."""
        owner = self.cut.owners.get(parameter)  # type: ignore[call-overload]
        return owner is None or owner in self.stages

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter; None for one that is not the model's."""
        return self.cut.owners.get(parameter)  # type: ignore[call-overload, no-any-return]

    def stage_of_module(self, module: nn.Module) -> int:
        """The stage that runs `module`, or the first one that runs a part of it."""
        if (found := self._stage_of.get(module)) is not None:
            return found
        inside = set(module.modules())
        numbers = [n for n, atom in enumerate(self.cut.atoms) if atom.module in inside]
        return self.cut.stage_of(min(numbers, default=0))

    def ran(self, module: nn.Module, stage: int) -> None:
        """A module without parameters has run where its input was."""
        for inner in module.modules():
            self._stage_of[inner] = stage

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Inside the block forwards are those of `run`."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside the block forwards are the modules' own."""
        before, self.is_whole = self.is_whole, True
        try:
            with self.inside():
                yield
        finally:
            self.is_whole = before

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block operations are those of one stage."""
        self.inside_of += 1
        try:
            yield
        finally:
            self.inside_of -= 1

    def another_way(self, source: int, target: int) -> UsageError:
        """The error for a batch that goes another way through the layers than the first."""
        return UsageError(
            f"Stage {source} has something for stage {target} that it did not have in the first "
            "micro-batch. Let the model's forward take the same way through its layers for every "
            "batch, or use a plain loop: loss = ...; engine.backward(loss)."
        )
