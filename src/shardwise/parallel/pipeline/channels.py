"""Channels between pipeline stages: a pair of ranks for each kind of message, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle

MOST_IN_FLIGHT = 64
"""The number of sent messages that are held while nothing says that they were received."""

ChannelKind = str
""""forward" and "backward" for values and their gradients; "weight N" and "gradient N" for tied
weights."""


class Channels:
    """Messages between the stages of a pipeline, whose ranks are those of `group`.

    Messages of one kind from one stage to another arrive in the order in which they were sent;
    between two stages of one rank they are queued. A sender does not wait for the receiver.
    """

    def __init__(self, group: Collectives, rank_of: Callable[[int], int]) -> None:
        self._group = group
        self._rank_of = rank_of
        self._pairs: dict[tuple[ChannelKind, int, int], Collectives] = {}
        self._local: dict[tuple[ChannelKind, int, int], deque[Tensor]] = {}
        self._in_flight: dict[Handle, Tensor] = {}

    def open(self, kind: ChannelKind, source: int, target: int) -> None:
        """Open a channel. Collective over the group, in the same order on all of its ranks."""
        if (kind, source, target) in self._pairs or (kind, source, target) in self._local:
            return
        a, b = self._rank_of(source), self._rank_of(target)
        if a == b:
            self._local[kind, source, target] = deque()
        else:
            # A pair for each kind, since two stages may reach messages of different kinds in
            # different orders.
            self._pairs[kind, source, target] = self._group.split([sorted((a, b))])

    def are_open(self, source: int, target: int) -> bool:
        """Whether values can go from one stage to the other, and gradients back."""
        key = ("forward", source, target)
        return key in self._pairs or key in self._local

    def send(self, kind: ChannelKind, source: int, target: int, value: Tensor) -> Handle:
        """Send a copy of `value`."""
        # The transport reads the copy until it is received; the caller may write to `value` now.
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        if (local := self._local.get((kind, source, target))) is not None:
            local.append(copy)
            return Handle()
        if not copy.numel():
            return Handle()
        pair = self._pairs[kind, source, target]
        handle = pair.broadcast(copy.view(-1), pair.rank)
        self._in_flight[handle] = copy
        return handle

    def release(self, handle: Handle) -> None:
        """Release the buffer of a message that is known to have been received."""
        if self._in_flight.pop(handle, None) is not None:
            handle.reusable()

    def receive(
        self, kind: ChannelKind, source: int, target: int, like: Tensor, device: torch.device
    ) -> Tensor:
        """Receive a tensor of the shape and dtype of `like`. Waits for it."""
        if (local := self._local.get((kind, source, target))) is not None:
            return local.popleft()
        value = torch.empty(like.shape, dtype=like.dtype, device=device)
        if value.numel():
            pair = self._pairs[kind, source, target]
            pair.broadcast(value.view(-1), 1 - pair.rank).wait()
        last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        return value.contiguous(memory_format=torch.channels_last) if last else value

    def wait_all(self) -> None:
        """Wait until all sent messages have been received."""
        for handle in list(self._in_flight):
            self.release(handle)

    def release_old(self) -> None:
        """Release the buffers of messages that were sent long ago, and so have been received."""
        for handle in list(self._in_flight)[:-MOST_IN_FLIGHT]:
            self.release(handle)

    def close(self) -> None:
        """Close the channels."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        self._local.clear()
        self._in_flight.clear()
