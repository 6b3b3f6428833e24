"""The ranks that share out the layers of a model, as this one sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.collectives import Collectives
from shardwise.errors import UsageError
from shardwise.parallel.pipeline.atoms import Cut
from shardwise.parallel.pipeline.channels import Channels
from shardwise.parallel.pipeline.custody import Custody, refuse_copies
from shardwise.parallel.pipeline.forms import Forms
from shardwise.parallel.pipeline.forwards import (
    AtomForward,
    FloatingForward,
    Forward,
    ModelForward,
)
from shardwise.parallel.pipeline.loans import Loans
from shardwise.parallel.pipeline.values import Following, Run
from shardwise.randomness import seed_from


class Line:
    """The stages of a model over the ranks of `group`, stage s on rank s % size.

    It stands in for the forwards of `model` and its atoms, and moves what goes between stages.
    """

    cut: Cut

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.channels = Channels(group, self.rank_of)
        self.stages: frozenset[int] = frozenset()
        self.run = Run(self.stages)
        self.is_whole = False
        """Whether this rank has the whole model for now, so that forwards are the plain ones."""
        self.writes = False
        """Whether what is written into it then is taken in."""
        self._following = Following(self)
        self._seed, self._draws = 0, 0
        self._in_forward = False
        self.loans = Loans(self)
        self.custody = Custody(self)
        self.forms = Forms(self)
        self._forwards: list[Forward] = []
        self._handles: list[RemovableHandle] = []

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

    def trained(self) -> list[nn.Parameter]:
        """What gradients come to on this rank."""
        own = [p for p, owner in self.cut.owners.items() if owner in self.stages]
        return [p for p in [*own, *self.loans.borrowed] if p.requires_grad]

    @property
    def shares_at_home(self) -> bool:
        """Whether two stages of one rank use the same parameter."""
        return any(
            len({self.rank_of(s) for s in (owner, *self.cut.lent[p])}) <= len(self.cut.lent[p])
            for p, owner in self.cut.owners.items()
            if p in self.cut.lent
        )

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

    # -- standing in for forwards -----------------------------------------------------------

    def install(self, model: nn.Module) -> None:
        """Stand in for the forwards of `model` and its layers."""
        for number, atom in enumerate(self.cut.atoms):
            stage = self.cut.stage_of(number)
            self._forwards.append(AtomForward(self, atom.module, atom.name, stage))
        for module in self.cut.floating:
            self._forwards.append(FloatingForward(self, module))
        if model not in {atom.module for atom in self.cut.atoms}:
            self._forwards.append(ModelForward(self, model))
        self._handles = refuse_copies(model)

    def reset(self) -> None:
        """Forget what is under way, and the ways on which it may still come."""
        self.run = Run(self.stages)
        self.loans.changed()
        self.channels.close()

    def close(self) -> None:
        """Give the modules their own forwards back, and leave the ways between stages."""
        for forward in reversed(self._forwards):
            forward.undo()
        self._forwards.clear()
        for handle in self._handles:
            handle.remove()
        self.group.barrier()  # nobody waits for a message any more
        self.channels.close()

    # -- runs -------------------------------------------------------------------------------

    def begin(self, seed: int) -> None:
        """What is drawn from now on follows from `seed`."""
        self._seed, self._draws = seed, 0

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Inside the block forwards are those of `run`."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before

    def draw(self) -> int:
        """A number for what is drawn next, alike on all ranks of the line."""
        self._draws += 1
        return seed_from("stages", self._seed, self._draws)

    def sow(self, *coordinates: int | str) -> None:
        """Set the generators of this rank."""
        seed = seed_from(*coordinates)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    # -- moves ------------------------------------------------------------------------------

    def borrow(self, parameter: nn.Parameter, stage: int) -> None:
        """Let `stage` have a parameter that another one trains."""
        self.loans.borrow(parameter, stage)

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that trains a parameter; None for one that is not the model's."""
        return self.cut.owners.get(parameter)  # type: ignore[call-overload, no-any-return]

    def open(self, source: int, target: int) -> None:
        """Make the ways between two stages, on all ranks: not while a schedule runs."""
        if self.channels.are_open(source, target):
            return
        if self.run.planned and not self.run.trying:
            raise self.another_way(source, target)
        self.channels.open("forward", source, target)
        self.channels.open("backward", target, source)

    def another_way(self, source: int, target: int) -> UsageError:
        """The error for a batch that goes another way through the layers than the first."""
        return UsageError(
            f"Stage {source} has something for stage {target} that it did not have in the first "
            "micro-batch. Let the model's forward take the same way through its layers for every "
            "batch, or use a plain loop: loss = ...; engine.backward(loss)."
        )

    def settle(self) -> None:
        """Return when what was sent has come."""
        self.channels.settle()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside the block is a forward of the model: a run of its own, unless a schedule or a
        forward around it has begun one."""
        if not self.run.planned and not self._in_forward:
            self.channels.tidy()
            self.run = Run(self.stages)
        before, self._in_forward = self._in_forward, True
        try:
            yield
        finally:
            self._in_forward = before

    def gradient(self, source: int, target: int, value: Tensor) -> Tensor:
        """The gradient of a value that `source`, here, has sent to `target`."""
        return self.channels.receive("backward", target, source, value, self.device)

    def arrived(self, run: Run) -> None:
        """The gradients of all that was sent in `run` have come, so that has come too."""
        while run.flying:
            self.channels.arrived(run.flying.pop())

    def return_gradient(self, source: int, target: int, leaf: Tensor) -> None:
        """Send the gradient of a value that `target`, here, has of `source`."""
        grad, leaf.grad = leaf.grad, None
        self.channels.send(
            "backward", target, source, torch.zeros_like(leaf) if grad is None else grad
        )

    def send(self, run: Run, source: int, target: int, value: Tensor) -> None:
        """Send a value forward."""
        handle = self.channels.send("forward", source, target, value)
        if value.requires_grad and torch.is_grad_enabled():
            run.sent.append((source, target, value))
            run.flying.append(handle)

    def receive(self, run: Run, source: int, target: int, like: Tensor) -> Tensor:
        """Receive a value: a leaf of this rank's graph, where it carries gradients."""
        value = self.channels.receive("forward", source, target, like, self.device)
        if like.requires_grad and torch.is_grad_enabled():
            value.requires_grad_()
            run.received.append((source, target, value))
        return value

    def followed(self) -> None:
        """A parameter was used outside of all layers."""
        self.loans.are_outside = True

    def spread(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """What `source` has, on all ranks. Collective."""
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.detach().contiguous()
        rank = self.rank_of(source)
        near = value.to(self.group.small_device) if value.device.type == "cpu" else value
        if near.numel():
            self.group.broadcast(near.view(-1), rank).wait()
        return near.to(value.device)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside the block forwards are the modules' own."""
        before, self.is_whole = self.is_whole, True
        try:
            with self._following.off():
                yield
        finally:
            self.is_whole = before

    def following(self) -> Any:
        """What follows parameters that are used outside of all layers, unless none is."""
        known = self.run.planned and not self.run.trying
        return nullcontext() if known and not self.loans.are_outside else self._following

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block operations are those of one stage."""
        with self._following.off():
            yield
