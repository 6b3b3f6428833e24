"""Creates views of a bucket's flat memory: one per gradient, in the shape of its parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import Bucket, Span
from shardwise.states.parameters.named_parameters import NamedParameter


class BucketViews:
    """Views of a bucket's flat memory. The span `apart` is in `own`, the rest in `buffer`.

    `buffer` has shape (numel,). A slot that straddles a boundary of `apart` has several flat views.
    `named` holds the parameter of each slot.
    """

    def __init__(
        self,
        layout: Bucket,
        named: Sequence[NamedParameter],
        buffer: Tensor,
        apart: Span = (0, 0),
        own: Tensor | None = None,
    ) -> None:
        self._named = named
        self.targets: list[list[Tensor]] = []
        """For each slot, the views that receive its gradient."""
        self.gaps: list[Tensor] = []
        """The memory between slots."""

        def memory(start: int, end: int) -> list[Tensor]:
            """Return the memory of elements [start, end) in order, as one or more tensors."""
            if own is None:
                return [buffer[start:end]]
            first, last = apart
            borders = sorted({border for border in apart if start < border < end})
            return [
                own[a - first : b - first] if first <= a < last else buffer[a:b]
                for a, b in pairwise([start, *borders, end])
            ]

        end = 0
        for slot, each in zip(layout.slots, named, strict=True):
            if end < slot.start:
                self.gaps += memory(end, slot.start)
            parts = memory(slot.start, slot.end)
            self.targets.append(parts if len(parts) > 1 else [each.view(p, 0) for p in parts])
            end = slot.end
        if end < layout.numel:
            self.gaps += memory(end, layout.numel)

    def parts(self, place: int, value: Tensor) -> Sequence[Tensor]:
        """Split `value`, shaped like a slot's parameter, to match the slot's `targets`."""
        targets = self.targets[place]
        if len(targets) == 1:
            return [value]
        flat = self._named[place].flat(value)
        if flat is None:
            flat = self._named[place].flattened(value)
        return torch.split(flat, [target.numel() for target in targets])
