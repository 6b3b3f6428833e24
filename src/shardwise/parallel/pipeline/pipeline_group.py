"""Combines the stages, channels and parameters of a pipeline, as seen from one rank."""

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
    """Interface of a change to modules that can be undone."""

    def undo(self) -> None:
        pass


class TensorParallelParameters(Protocol):
    """Interface of the tensor-parallel state that pipelines use."""

    def whole_of(self, parameter: nn.Parameter) -> Tensor:
        """Gather the full value of a parameter that is split over ranks. Collective."""

    def whole_shape(self, parameter: nn.Parameter) -> tuple[int, ...] | None:
        """Return the full shape of a parameter, or None if it is not split."""


class PipelineGroup(Stages):
    """The stages, channels and parameters of a pipeline on this rank.

    `replaced_forwards` lists the replacements of `forward` in the model and its layers.
    """

    def __init__(self, group: Collectives, device: torch.device) -> None:
        super().__init__(group, device)
        self.tied_weights = TiedWeights(self)
        self.ownership = ParameterOwnership(self, self.tied_weights)
        self.fake_outputs = FakeOutputs(self)
        self.replaced_forwards: list[Undoable] = []
        self.tensor_parallel: TensorParallelParameters | None = None
        """The tensor-parallel split of the layers on this rank, or None."""
        self._seed, self._draws = 0, 0
        self._in_forward = False

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that receive gradients on this rank."""
        own = [p for p, owner in self.partition.owners.items() if owner in self.stages]
        return [p for p in [*own, *self.tied_weights.received] if p.requires_grad]

    @property
    def has_local_ties(self) -> bool:
        """True if two stages on the same rank use the same parameter."""
        return any(
            len({self.rank_of(s) for s in (owner, *self.partition.tied[p])})
            <= len(self.partition.tied[p])
            for p, owner in self.partition.owners.items()
            if p in self.partition.tied
        )

    def reset(self) -> None:
        """Drop the current StageRun, and close its channels, where late messages may arrive."""
        self.run = StageRun(self.stages)
        self.tied_weights.invalidate()
        self.channels.close()

    def close(self) -> None:
        """Restore the modules' own `forward`, and close the channels. Collective."""
        for forward in reversed(self.replaced_forwards):
            forward.undo()
        self.replaced_forwards.clear()
        # A rank may still be waiting for a message on a channel.
        self.group.barrier()
        self.channels.close()

    # -- runs -------------------------------------------------------------------------------

    def seed_forward(self, seed: int) -> None:
        """Set the seed for the random numbers that layers draw in this forward pass."""
        self._seed, self._draws = seed, 0

    def next_draw(self) -> int:
        """Return a seed for the next layer or floating module, the same on all ranks."""
        self._draws += 1
        return seed_from("stages", self._seed, self._draws)

    def seed_generators(self, *coordinates: int | str) -> None:
        """Seed this rank's CPU and device generators from `coordinates`."""
        seed = seed_from(*coordinates)
        for device in {torch.device("cpu"), self.device}:
            generator_of(device).manual_seed(seed)

    # -- exchange between stages -----------------------------------------------------------

    def add_user(self, parameter: nn.Parameter, stage: int) -> None:
        """Record that stage `stage` uses another stage's parameter, and send it the parameter."""
        self.tied_weights.add_user(parameter, stage)

    def open_channels(self, source: int, target: int) -> None:
        """Open the channels between two stages. Collective if they are not open yet.

        Raises UsageError while a schedule runs, because the other ranks cannot open them then.
        """
        if self.channels.are_open(source, target):
            return
        if self.run.scheduled and not self.run.is_trial:
            raise self.new_path_error(source, target)
        self.channels.open("forward", source, target)
        self.channels.open("backward", target, source)

    def settle(self) -> None:
        """Wait until all sent messages have been received."""
        self.channels.wait_all()

    def renew_run(self) -> None:
        """Start a new StageRun if a backward pass has consumed the current one."""
        if self.run.is_over:
            self.run = StageRun(self.stages)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager for a forward pass of the model, which starts a new StageRun.

        If a schedule or an enclosing forward pass has already started a StageRun, it uses that one.
        """
        if not self.run.scheduled and not self._in_forward:
            self.channels.release_old()
            self.run = StageRun(self.stages)
        before, self._in_forward = self._in_forward, True
        try:
            yield
        finally:
            self._in_forward = before

    def receive_gradient(self, source: int, target: int, value: Tensor) -> Tensor:
        """Receive the gradient of `value` from stage `target`, to which `source` sent `value`."""
        return self.channels.receive("backward", target, source, value, self.device)

    def release_sent(self, run: StageRun) -> None:
        """Release the buffers of the values that were sent in `run`.

        Call this once their gradients have arrived, which proves that the values were received.
        """
        while run.in_flight:
            self.channels.release(run.in_flight.pop())

    def send_gradient(self, source: int, target: int, leaf: Tensor) -> None:
        """Send the gradient of `leaf` to stage `source`, which sent `leaf` to stage `target`."""
        # Send zeros if the loss does not depend on the value, because the receiver waits for a
        # gradient.
        grad, leaf.grad = leaf.grad, None
        self.channels.send(
            "backward", target, source, torch.zeros_like(leaf) if grad is None else grad
        )

    def send(self, run: StageRun, source: int, target: int, value: Tensor) -> None:
        """Send a value from stage `source` on this rank to the later stage `target`."""
        handle = self.channels.send("forward", source, target, value)
        if value.requires_grad and torch.is_grad_enabled():
            # Only these values receive a gradient from the other stage.
            run.sent.append((source, target, value))
            run.in_flight.append(handle)

    def receive(self, run: StageRun, source: int, target: int, like: Tensor) -> Tensor:
        """Receive a value with the shape and dtype of `like`.

        If the value requires a gradient, attach it to a new leaf in this rank's graph.
        """
        value = self.channels.receive("forward", source, target, like, self.device)
        if like.requires_grad and torch.is_grad_enabled():
            # The value itself must not be a leaf (see `_OfLeaf`).
            leaf = value.detach().requires_grad_()
            run.received.append((source, target, leaf))
            return cast(Tensor, _OfLeaf.apply(leaf, value))  # type: ignore[no-untyped-call]
        return value

    def whole_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Return the full parameter. Collective if tensor parallelism splits it."""
        return (
            parameter if self.tensor_parallel is None else self.tensor_parallel.whole_of(parameter)
        )

    def fake_parameter(self, parameter: nn.Parameter) -> FakeTensor:
        """Return a fake tensor with the shape of the full parameter."""
        shape = (
            None if self.tensor_parallel is None else self.tensor_parallel.whole_shape(parameter)
        )
        if shape is None:
            return fake_like(parameter)
        with fake_mode():
            fake = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        assert isinstance(fake, FakeTensor)
        fake.requires_grad_(parameter.requires_grad)
        return fake

    def broadcast(self, source: int, value: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast a value from stage `source` to all ranks. Collective."""
        if value is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        value = value.detach().contiguous()
        rank = self.rank_of(source)
        # The transport's collectives run on `small_device`, such as the GPU for NCCL.
        staged = value.to(self.group.small_device) if value.device.type == "cpu" else value
        if staged.numel():
            self.group.broadcast(staged.view(-1), rank).wait()
        return staged.to(value.device)


class _OfLeaf(torch.autograd.Function):
    """Returns `value`, and passes its gradient on to `leaf`. The two share their memory."""

    # A view of the leaf would not do: autograd forbids in-place writes to a view of a leaf, and a
    # stage may start with an in-place operation. `mark_dirty` makes `value` an output without a
    # copy.

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        del leaf
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
