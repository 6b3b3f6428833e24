"""An exponential moving average of the weights, on the intervals that a rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.states.optimizer_state import OptimizerState, in_memory_order
from shardwise.states.parameters import ReplicatedParameters


class Averages:
    """average = decay x average + (1 - decay) x weight after each step, in the master dtype."""

    def __init__(
        self,
        parameters: ReplicatedParameters,
        optimizer: OptimizerState,
        decay: float,
        *,
        scattered: bool,
        start: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """`start` gives averages to go on with, by parameter; without it they are the weights."""
        self._parameters = parameters
        self._optimizer = optimizer
        self._decay = decay
        self._scattered = scattered
        self.tensors = [part.master.clone() for part in optimizer.parts]
        for part, tensor in zip(optimizer.parts, self.tensors, strict=True):
            for piece in part.bucket.pieces(*part.own):
                parameter = parameters.tracked[piece.parameter].parameter
                if start is not None and parameter in start:
                    value = in_memory_order(start[parameter], parameter)[piece.offset :]
                    length = piece.end - piece.start
                    tensor[piece.start - part.own[0] :][:length] = value[:length]

    @property
    def state_bytes(self) -> int:
        """Bytes of averages that this rank keeps."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def update(self) -> None:
        """Follow the weights; after each step that was not skipped."""
        for part, tensor in zip(self._optimizer.parts, self.tensors, strict=True):
            tensor.lerp_(part.master, 1.0 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the parameters hold the averages inside the block; all ranks enter and leave."""
        kept = [flat.clone() for flat in self._parameters.flats]
        for part, tensor in zip(self._optimizer.parts, self.tensors, strict=True):
            part.target.copy_(tensor)
        if self._scattered:
            for handle in [self._parameters.publish(i) for i in range(len(kept))]:
                handle.wait()
        self._parameters.touch()
        try:
            yield
        finally:
            with torch.no_grad():
                for flat, value in zip(self._parameters.flats, kept, strict=True):
                    flat.copy_(value)
            self._parameters.touch()
