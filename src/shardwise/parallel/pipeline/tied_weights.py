"""Sends tied weights from their owner to the other stages, and their gradients back to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.model.precision import NARROW
from shardwise.parallel.pipeline.stages import Stages


class TiedWeights:
    """Sends the tied weights of `pipeline` to the stages that use them, after every update."""

    def __init__(self, pipeline: Stages) -> None:
        self._pipeline = pipeline
        self._sent: set[nn.Parameter] = set()

    def invalidate(self) -> None:
        """Mark all weights as changed, so that they are sent again before their next use."""
        self._sent.clear()

    def send_for_layer(self, layer: nn.Module, stage: int) -> None:
        """Send or receive the tied weights of a layer that stage `stage` is about to run."""
        for parameter in layer.parameters():
            if parameter in self._pipeline.partition.tied:
                if self._pipeline.run.is_trial or not self._pipeline.run.scheduled:
                    self._open_channels(parameter)
                if not self._pipeline.run.is_trial:
                    self._send_or_receive(parameter, stage)

    def add_user(self, parameter: nn.Parameter, stage: int) -> None:
        """Send or receive a weight that stage `stage` uses outside all layers."""
        users = self._pipeline.partition.tied.setdefault(parameter, [])
        if stage not in users:
            # Under a schedule, the other ranks are in different micro-batches and cannot open a
            # channel.
            if self._pipeline.run.scheduled and not self._pipeline.run.is_trial:
                raise self._pipeline.new_path_error(
                    self._pipeline.partition.owners[parameter], stage
                )
            users.append(stage)
            users.sort()
        if self._pipeline.run.is_trial or not self._pipeline.run.scheduled:
            self._open_channels(parameter)
        if not self._pipeline.run.is_trial:
            self._send_or_receive(parameter, self._pipeline.partition.owners[parameter])
            self._send_or_receive(parameter, stage)

    def _send_or_receive(self, parameter: nn.Parameter, stage: int) -> None:
        """Send or receive a weight if stage `stage` is on this rank and the weight has changed."""
        if parameter in self._sent or stage not in self._pipeline.run.stages:
            return
        owner = self._pipeline.partition.owners[parameter]
        if stage == owner:
            self._sent.add(parameter)
            with self._pipeline.within_stage():
                for target in self._receivers(parameter):
                    self._pipeline.channels.send(
                        self._channel_kind("weight", parameter), owner, target, parameter.detach()
                    )
        elif not self._pipeline.owns(parameter):
            self._sent.add(parameter)
            with torch.no_grad(), self._pipeline.within_stage():
                parameter.data = self._pipeline.channels.receive(
                    self._channel_kind("weight", parameter),
                    owner,
                    self._first_stage_here(parameter),
                    parameter,
                    self._pipeline.device,
                )

    def _open_channels(self, parameter: nn.Parameter) -> None:
        owner = self._pipeline.partition.owners[parameter]
        for receiver in self._receivers(parameter):
            self._pipeline.channels.open(self._channel_kind("weight", parameter), owner, receiver)
            self._pipeline.channels.open(self._channel_kind("gradient", parameter), receiver, owner)

    def _receivers(self, parameter: nn.Parameter) -> list[int]:
        """Return one stage for each rank that receives the weight: the first stage that uses it."""
        # One stage per rank is enough, because stages on the same rank share the tensor.
        ranks = {self._pipeline.rank_of(self._pipeline.partition.owners[parameter])}
        receivers = []
        for stage in self._pipeline.partition.tied[parameter]:
            if self._pipeline.rank_of(stage) not in ranks:
                ranks.add(self._pipeline.rank_of(stage))
                receivers.append(stage)
        return receivers

    def _first_stage_here(self, parameter: nn.Parameter) -> int:
        return next(
            s for s in self._pipeline.partition.tied[parameter] if s in self._pipeline.stages
        )

    @property
    def received(self) -> list[nn.Parameter]:
        """The weights that this rank uses but another rank owns."""
        return [
            p
            for p, stages in self._pipeline.partition.tied.items()
            if not self._pipeline.owns(p) and not self._pipeline.stages.isdisjoint(stages)
        ]

    def send_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Send the gradients of received weights to their owners."""
        for parameter in filter(_is_trained, self.received):
            # Send zeros if there is no gradient, because the owner waits for one from every user.
            if (gradient := gradients.get(parameter)) is None:
                gradient = torch.zeros_like(parameter)
            owner, stage = (
                self._pipeline.partition.owners[parameter],
                self._first_stage_here(parameter),
            )
            self._pipeline.channels.send(
                self._channel_kind("gradient", parameter),
                stage,
                owner,
                gradient.to(_gradient_dtype(parameter)),
            )

    def receive_gradients(self, stage: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Receive the gradients of stage `stage`'s weights from all other ranks that use them."""
        gradients = []
        for parameter in self.owned_by(stage):
            # Use the meta device, because only shape and dtype are needed.
            like = torch.empty(parameter.shape, dtype=_gradient_dtype(parameter), device="meta")
            kind = self._channel_kind("gradient", parameter)
            for receiver in self._receivers(parameter):
                grad = self._pipeline.channels.receive(
                    kind, receiver, stage, like, self._pipeline.device
                )
                gradients.append((parameter, grad.to(parameter.dtype)))
        return gradients

    def owned_by(self, stage: int) -> list[nn.Parameter]:
        """Return the trained weights that stage `stage` owns and other ranks use."""
        partition = self._pipeline.partition
        return [
            p
            for p in partition.tied
            if partition.owners[p] == stage and self._receivers(p) and _is_trained(p)
        ]

    def _channel_kind(self, direction: str, parameter: nn.Parameter) -> str:
        """Return the kind of channel (see `ChannelKind`) for a weight or its gradient."""
        # Use one channel per weight, because ranks may reach the weights in different orders.
        return f"{direction} {self._numbers[parameter]}"

    @cached_property
    def _numbers(self) -> dict[nn.Parameter, int]:
        # All ranks number the parameters of the full model, so the numbers agree.
        return {
            parameter: number for number, parameter in enumerate(self._pipeline.partition.owners)
        }


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype for summing and sending a weight's gradients."""
    return torch.float32 if parameter.dtype in NARROW else parameter.dtype


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad
