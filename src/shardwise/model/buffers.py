"""Buffers: alike at the start, and kept in step.

Buffers are not trained, but forward may change them (running statistics). At the start all ranks
take rank 0's. After that, those that forward is seen to change are averaged over the ranks at
each step, weighted by what each rank's window weighed, so that after `step()` all ranks hold the
same model. Which ones change is learned: a rank that sees a new one says so, and from then on its
values ride in the step's one small collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.collectives import Collectives

Place = tuple[nn.Module, str]


class Buffers:
    """The buffers of the models, each known by the module and key that hold it."""

    def __init__(self, models: Sequence[nn.Module], group: Collectives) -> None:
        self._group = group
        self._places: list[Place] = []
        seen: set[int] = set()
        for module in (module for model in models for module in model.modules()):
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, key))
        self._followed: list[int] = []
        self._saved: list[tuple[int, Tensor]] = []
        self._seen: list[tuple[int, int]] = []

    def broadcast(self) -> None:
        """Give every rank the values of rank 0."""
        for index in range(len(self._places)):
            buffer = self._buffer(index)
            flat = buffer.detach().contiguous().view(-1)
            if flat.numel():
                flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
                self._group.broadcast(flat).wait()
                buffer.copy_(flat.view(buffer.dtype).view(buffer.shape))
        self.remember()

    def remember(self) -> None:
        """Take the present values as those of which changes are told."""
        self._seen = [self._mark(index) for index in range(len(self._places))]

    def leave_out(self, modules: set[nn.Module]) -> None:
        """Do not follow buffers of `modules`, which keep them in step themselves."""
        self._places = [place for place in self._places if place[0] not in modules]
        self.remember()

    def news(self) -> list[int]:
        """Buffers not followed yet, of modules of which one changed since `remember`.

        Of the module as a whole, since torch's batch_norm writes its running statistics without
        raising their version, as it does that of the count beside them.
        """
        changed = {
            self._places[index][0]
            for index, mark in enumerate(self._seen)
            if self._mark(index) != mark
        }
        followed = set(self._followed)
        return [
            index
            for index, (module, _) in enumerate(self._places)
            if module in changed and index not in followed
        ]

    def follow(self, indices: set[int]) -> None:
        """Average these too from now on; alike on all ranks."""
        self._followed = sorted({*self._followed, *indices})

    def values(self) -> Tensor:
        """What is followed, as one fp64 vector."""
        parts = [self._buffer(i).detach().reshape(-1).double() for i in self._followed]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def average(self, rows: Tensor, weights: Tensor) -> None:
        """Set what is followed to the mean of the ranks' `rows` by `weights` (each ≥ 0)."""
        if not rows.numel():
            return
        counted = rows[weights > 0]
        mean = (counted * weights[weights > 0].unsqueeze(1)).sum(0) / weights.sum()
        offset = 0
        for index in self._followed:
            buffer = self._buffer(index)
            part = mean[offset : offset + buffer.numel()].view(buffer.shape)
            if not (buffer.is_floating_point() or buffer.is_complex()):
                part = part.round()
            buffer.copy_(part)
            offset += buffer.numel()

    def save(self) -> None:
        """Keep the present values: what comes next is a stand-in's forward."""
        if not self._saved:
            self._saved = [(i, self._buffer(i).clone()) for i in range(len(self._places))]

    def restore(self) -> None:
        """Undo what a stand-in's forward did."""
        for index, value in self._saved:
            if not torch.equal(self._buffer(index), value):
                self._buffer(index).copy_(value)
        self._saved = []

    def _buffer(self, index: int) -> Tensor:
        module, key = self._places[index]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def _mark(self, index: int) -> tuple[int, int]:
        buffer = self._buffer(index)
        return id(buffer), buffer._version
