"""The ranks of one pipeline, as this rank sees them: its stages, their channels and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Collectives
from shardwise.parallel.pipeline.fake_outputs import FakeOutputs
from shardwise.parallel.pipeline.fake_tensors import fake_like, fake_mode
from shardwise.parallel.pipeline.parameter_ownership import ParameterOwnership
from shardwise.parallel.pipeline.stage_tensors import StageRun
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.pipeline.tied_weights import TiedWeights
from shardwise.world.randomness import generator_of, seed_from


class Undoable(Protocol):
    """A change to modules that can be undone."""

    def undo(self) -> None:
        """Restore the modules."""


class TensorParallelParameters(Protocol):
    """The tensor-parallel state, as far as pipelines use it."""

    def whole_of(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a parameter of which this rank has a part. Collective."""

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...] | None:
        """The shape of the whole; None for a parameter that is not split."""


class PipelineGroup(Stages):
    """The stages of a pipeline, and everything that they exchange.

    `replaced_forwards` are the replacements of the model's and its layers' forwards.
    """

    def __init__(self, group: Collectives, device: torch.device) -> None:
        super().__init__(group, device)
        self.tied_weights = TiedWeights(self)
        self.ownership = ParameterOwnership(self, self.tied_weights)
        self.fake_outputs = FakeOutputs(self)
        self.replaced_forwards: list[Undoable] = []
        self.tensor_parallel: TensorParallelParameters | None = None
        """The tensor-parallel split of the layers on this rank, if any."""
        self._seed, self._draws = 0, 0
        self._in_forward = False

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that get gradients on this rank."""
        own = [p for p, owner in self.partition.owners.items() if owner in self.stages]
        return [p for p in [*own, *self.tied_weights.received] if p.requires_grad]

    @property
    def has_local_ties(self) -> bool:
        """Whether two stages of one rank use the same parameter."""
        return any(
            len({self.rank_of(s) for s in (owner, *self.partition.tied[p])})
            <= len(self.partition.tied[p])
            for p, owner in self.partition.owners.items()
            if p in self.partition.tied
        )

    def reset(self) -> None:
        """Forget the run in progress, and close the channels on which its messages may still
        come."""
        self.run = StageRun(self.stages)
        self.tied_weights.invalidate()
        self.channels.close()

    def close(self) -> None:
        """Restore the modules' own forwards, and close the channels. Collective."""
        for forward in reversed(self.replaced_forwards):
            forward.undo()
        self.replaced_forwards.clear()
        self.group.barrier()  # no rank waits for a message of a channel that closes now
        self.channels.close()

    # -- runs -------------------------------------------------------------------------------

    def seed_forward(self, seed: int) -> None:
        """Derive the random numbers that follow from `seed`."""
        self._seed, self._draws = seed, 0

    def next_draw(self) -> int:
        """A seed for the next layer or floating module, equal on all ranks of the pipeline."""
        self._draws += 1
        return seed_from("stages", self._seed, self._draws)

    def seed_generators(self, *coordinates: int | str) -> None:
        """Seed the generators of this rank."""
        seed = seed_from(*coordinates)
        for device in {torch.device("cpu"), self.device}:
            generator_of(device).manual_seed(seed)

    # -- exchange between stages -----------------------------------------------------------

    def add_user(self, parameter: nn.Parameter, stage: int) -> None:
        """Let `stage` use a parameter that another stage owns."""
        self.tied_weights.add_user(parameter, stage)

    def open_channels(self, source: int, target: int) -> None:
        """Open the channels between two stages, on all ranks: not while a schedule runs."""
        if self.channels.are_open(source, target):
            return
        if self.run.scheduled and not self.run.is_trial:
            raise self.new_path_error(source, target)
        self.channels.open("forward", source, target)
        self.channels.open("backward", target, source)

    def settle(self) -> None:
        """Wait until everything that was sent has been received."""
        self.channels.wait_all()

    def renew_run(self) -> None:
        """Start another run if a backward has used the present one up."""
        if self.run.is_over:
            self.run = StageRun(self.stages)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of the model inside the block: as a run of its own, unless a schedule or an
        outer forward has started one."""
        if not self.run.scheduled and not self._in_forward:
            self.channels.release_old()
            self.run = StageRun(self.stages)
        before, self._in_forward = self._in_forward, True
        try:
            yield
        finally:
            self._in_forward = before

    def receive_gradient(self, source: int, target: int, value: Tensor) -> Tensor:
        """Receive the gradient of a value that `source`, here, has sent to `target`."""
        return self.channels.receive("backward", target, source, value, self.device)

    def release_sent(self, run: StageRun) -> None:
        """Release the buffers of values sent in `run`: their gradients have come, so they have been
        received."""
        while run.in_flight:
            self.channels.release(run.in_flight.pop())

    def send_gradient(self, source: int, target: int, leaf: Tensor) -> None:
        """Send the gradient of a value that `target`, here, has received from `source`."""
        grad, leaf.grad = leaf.grad, None
        self.channels.send(
            "backward", target, source, torch.zeros_like(leaf) if grad is None else grad
        )

    def send(self, run: StageRun, source: int, target: int, value: Tensor) -> None:
        """Send a value forward."""
        handle = self.channels.send("forward", source, target, value)
        if value.requires_grad and torch.is_grad_enabled():
            run.sent.append((source, target, value))
            run.in_flight.append(handle)

    def receive(self, run: StageRun, source: int, target: int, like: Tensor) -> Tensor:
        """Receive a value. If it carries gradients, it hangs on a leaf of this rank's graph."""
        value = self.channels.receive("forward", source, target, like, self.device)
        if like.requires_grad and torch.is_grad_enabled():
            # The value itself is no leaf: a stage may begin with an operation in place.
            leaf = value.detach().requires_grad_()
            run.received.append((source, target, leaf))
            return cast(Tensor, _OfLeaf.apply(leaf, value))  # type: ignore[no-untyped-call]
        return value

    def whole_parameter(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a parameter on this rank. Collective where layers are split further."""
        return (
            parameter if self.tensor_parallel is None else self.tensor_parallel.whole_of(parameter)
        )

    def fake_parameter(self, parameter: nn.Parameter) -> FakeTensor:
        """A fake tensor with the shape of the whole parameter."""
        shape = (
            None if self.tensor_parallel is None else self.tensor_parallel.whole_shape(parameter)
        )
        if shape is None:
            return fake_like(parameter)
        with fake_mode():
            made = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        assert isinstance(made, FakeTensor)
        made.requires_grad_(parameter.requires_grad)
        return made

    def broadcast(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast a value of `source` to all ranks. Collective."""
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.detach().contiguous()
        rank = self.rank_of(source)
        near = value.to(self.group.small_device) if value.device.type == "cpu" else value
        if near.numel():
            self.group.broadcast(near.view(-1), rank).wait()
        return near.to(value.device)


class _OfLeaf(torch.autograd.Function):
    """Gives `value` the gradients of `leaf`, which has the same memory: without a copy, and not as
    a view, which could not be written in place either."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        del leaf
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
