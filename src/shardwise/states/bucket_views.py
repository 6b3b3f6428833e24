"""Where one bucket's gradients of this rank go in a backward: by slot, into flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.layout import Bucket
from shardwise.states.tracked import Tracked


class Landing:
    """A bucket's place in `buffer`, but for the elements `apart`, which are in `own`.

    A slot is one view there, in the form of its parameter; one that a border of `apart` goes
    through is several, flat. `tracked` are the parameters of the slots.
    """

    def __init__(
        self,
        bucket: Bucket,
        tracked: Sequence[Tracked],
        buffer: Tensor,
        apart: tuple[int, int] = (0, 0),
        own: Tensor | None = None,
    ) -> None:
        self._tracked = tracked
        self.targets: list[list[Tensor]] = []
        """By slot, the memory that takes its gradient."""
        self.gaps: list[Tensor] = []
        """What lies between slots."""

        def memory(start: int, end: int) -> list[Tensor]:
            """That of the elements [start, end), in order."""
            if own is None:
                return [buffer[start:end]]
            first, last = apart
            borders = sorted({border for border in apart if start < border < end})
            return [
                own[a - first : b - first] if first <= a < last else buffer[a:b]
                for a, b in pairwise([start, *borders, end])
            ]

        end = 0
        for slot, form in zip(bucket.slots, tracked, strict=True):
            if end < slot.start:
                self.gaps += memory(end, slot.start)
            parts = memory(slot.start, slot.end)
            self.targets.append(parts if len(parts) > 1 else [form.view(p, 0) for p in parts])
            end = slot.end
        if end < bucket.numel:
            self.gaps += memory(end, bucket.numel)

    def parts(self, place: int, value: Tensor) -> Sequence[Tensor]:
        """`value`, of the form of a slot's parameter, as its `targets` take it."""
        targets = self.targets[place]
        if len(targets) == 1:
            return [value]
        flat = self._tracked[place].flat(value)
        if flat is None:
            flat = self._tracked[place].flattened(value)
        return torch.split(flat, [target.numel() for target in targets])
