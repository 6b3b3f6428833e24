"""The ranks that share out the layers of a model, as this one sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.collectives import Collectives
from shardwise.parallel.pipeline.output_forms import Forms
from shardwise.parallel.pipeline.parameter_ownership import Custody
from shardwise.parallel.pipeline.stage_tensors import Run, fakes, stand_in
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.pipeline.tied_weights import Loans
from shardwise.randomness import seed_from


class Undoable(Protocol):
    """What was put into modules, and can be taken out again."""

    def undo(self) -> None:
        """Take it out."""


class Parts(Protocol):
    """What has parts of parameters."""

    def whole_of(self, parameter: nn.Parameter) -> Tensor:
        """All of one of which this rank has a part. Collective."""

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...] | None:
        """Its shape; None for one that is not split."""


class Line(Stages):
    """What goes between the stages, and what the ranks have of each other.

    `forwards` are what stands in for those of the model and its layers.
    """

    def __init__(self, group: Collectives, device: torch.device) -> None:
        super().__init__(group, device)
        self.loans = Loans(self)
        self.custody = Custody(self, self.loans)
        self.forms = Forms(self)
        self.forwards: list[Undoable] = []
        self.split: Parts | None = None
        """What is split further of the layers that are here."""
        self._seed, self._draws = 0, 0
        self._in_forward = False

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

    def reset(self) -> None:
        """Forget what is under way, and the ways on which it may still come."""
        self.run = Run(self.stages)
        self.loans.changed()
        self.channels.close()

    def close(self) -> None:
        """Give the modules their own forwards back, and leave the ways between stages."""
        for forward in reversed(self.forwards):
            forward.undo()
        self.forwards.clear()
        self.group.barrier()  # nobody waits for a message any more
        self.channels.close()

    # -- runs -------------------------------------------------------------------------------

    def begin(self, seed: int) -> None:
        """What is drawn from now on follows from `seed`."""
        self._seed, self._draws = seed, 0

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

    def open(self, source: int, target: int) -> None:
        """Make the ways between two stages, on all ranks: not while a schedule runs."""
        if self.channels.are_open(source, target):
            return
        if self.run.planned and not self.run.trying:
            raise self.another_way(source, target)
        self.channels.open("forward", source, target)
        self.channels.open("backward", target, source)

    def settle(self) -> None:
        """Return when what was sent has come."""
        self.channels.settle()

    def renew(self) -> None:
        """Begin another run, where a backward has used the present one up."""
        if self.run.is_over:
            self.run = Run(self.stages)

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

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """All of a parameter that is here, also where layers are split further. Collective then."""
        return parameter if self.split is None else self.split.whole_of(parameter)

    def like(self, parameter: nn.Parameter) -> FakeTensor:
        """A stand-in for all of a parameter."""
        shape = None if self.split is None else self.split.whole_shape(parameter)
        if shape is None:
            return stand_in(parameter)
        with fakes():
            made = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        assert isinstance(made, FakeTensor)
        made.requires_grad_(parameter.requires_grad)
        return made

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
