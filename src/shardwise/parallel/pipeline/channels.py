"""What goes from one stage to another: a pair of ranks for each kind of message, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.collectives import Collectives, Handle

KEPT = 64
"""Messages that may be on their way, where nothing says when they have come."""

Kind = str
"""forward and backward: values, and their gradients; lent and back, each with a number: weights."""


class Channels:
    """Messages between the stages of a line, whose ranks are those of `group`.

    Those from one stage to another of one kind come in the order in which they were sent; between
    two stages of one rank they are handed over. Nothing waits for who receives.
    """

    def __init__(self, group: Collectives, rank_of: Callable[[int], int]) -> None:
        self._group = group
        self._rank_of = rank_of
        self._pairs: dict[tuple[Kind, int, int], Collectives] = {}
        self._kept: dict[tuple[Kind, int, int], deque[Tensor]] = {}
        self._flying: dict[Handle, Tensor] = {}

    def open(self, kind: Kind, source: int, target: int) -> None:
        """Make the channel. Collective over the group, alike on all of its ranks."""
        if (kind, source, target) in self._pairs or (kind, source, target) in self._kept:
            return
        a, b = self._rank_of(source), self._rank_of(target)
        if a == b:
            self._kept[kind, source, target] = deque()
        else:
            self._pairs[kind, source, target] = self._group.split([sorted((a, b))])

    def are_open(self, source: int, target: int) -> bool:
        """Whether values go from one stage to the other, and gradients back."""
        way = ("forward", source, target)
        return way in self._pairs or way in self._kept

    def send(self, kind: Kind, source: int, target: int, value: Tensor) -> Handle:
        """Send `value`, of which a copy is taken."""
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        if (kept := self._kept.get((kind, source, target))) is not None:
            kept.append(copy)
            return Handle()
        if not copy.numel():
            return Handle()
        pair = self._pairs[kind, source, target]
        handle = pair.broadcast(copy.view(-1), pair.rank)
        self._flying[handle] = copy
        return handle

    def arrived(self, handle: Handle) -> None:
        """What was sent is known to have come: let go of it."""
        if self._flying.pop(handle, None) is not None:
            handle.reusable()

    def receive(
        self, kind: Kind, source: int, target: int, like: Tensor, device: torch.device
    ) -> Tensor:
        """What was sent, of the shape and dtype of `like`. Waits for it."""
        if (kept := self._kept.get((kind, source, target))) is not None:
            return kept.popleft()
        value = torch.empty(like.shape, dtype=like.dtype, device=device)
        if value.numel():
            pair = self._pairs[kind, source, target]
            pair.broadcast(value.view(-1), 1 - pair.rank).wait()
        last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        return value.contiguous(memory_format=torch.channels_last) if last else value

    def settle(self) -> None:
        """Return when all that was sent has been received."""
        for handle in list(self._flying):
            self.arrived(handle)

    def tidy(self) -> None:
        """Let go of what was sent long ago; what receives it has no need of this rank by then."""
        for handle in list(self._flying)[:-KEPT]:
            self.arrived(handle)

    def close(self) -> None:
        """Leave the pairs."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        self._kept.clear()
        self._flying.clear()
