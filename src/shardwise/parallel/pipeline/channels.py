"""Sends messages between pipeline stages, over one ordered channel per kind of message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle

MOST_IN_FLIGHT = 64
"""Maximum number of sent messages whose buffers are held without a confirmation of receipt."""

ChannelKind = str
""""forward" (activations), "backward" (their gradients), "weight N" or "gradient N" (tied weights).
"""


class Channels:
    """Sends messages between the stages of a pipeline, over the ranks of `group`.

    Messages of the same kind from one stage to another arrive in the order in which they were sent.
    Stages on the same rank use a queue in memory. A sender does not wait for the receiver.
    """

    def __init__(self, group: Collectives, rank_of: Callable[[int], int]) -> None:
        self._group = group
        self._rank_of = rank_of
        self._pairs: dict[tuple[ChannelKind, int, int], Collectives] = {}
        self._local: dict[tuple[ChannelKind, int, int], deque[Tensor]] = {}
        # `release_old` relies on the insertion order being the order of sending.
        self._in_flight: dict[Handle, Tensor] = {}

    def open(self, kind: ChannelKind, source: int, target: int) -> None:
        """Open a channel.

        Collective: all ranks of the group must open channels in the same order.
        """
        if (kind, source, target) in self._pairs or (kind, source, target) in self._local:
            return
        a, b = self._rank_of(source), self._rank_of(target)
        if a == b:
            self._local[kind, source, target] = deque()
        else:
            # Create one group per kind of message, because a group matches calls by their order,
            # and two stages may reach messages of different kinds in different orders.
            self._pairs[kind, source, target] = self._group.split([sorted((a, b))])

    def are_open(self, source: int, target: int) -> bool:
        """Return whether the activation channel from stage `source` to stage `target` is open."""
        key = ("forward", source, target)
        return key in self._pairs or key in self._local

    def send(self, kind: ChannelKind, source: int, target: int, value: Tensor) -> Handle:
        """Send a copy of `value` without waiting for the receiver."""
        # The transport reads the buffer until the message is received. Give it a copy, because the
        # caller may write to `value` immediately.
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        if (local := self._local.get((kind, source, target))) is not None:
            local.append(copy)
            # Return an empty handle, because a message within the rank needs no release.
            return Handle()
        # Both sides know the shape, so an empty tensor needs no message. `receive` skips it too.
        if not copy.numel():
            return Handle()
        # A broadcast in a group of two is a send. Every transport supports broadcast, and the
        # sender does not block in it.
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
        """Wait for the next message and return it, with the shape and dtype of `like`."""
        if (local := self._local.get((kind, source, target))) is not None:
            return local.popleft()
        value = torch.empty(like.shape, dtype=like.dtype, device=device)
        if value.numel():
            pair = self._pairs[kind, source, target]
            pair.broadcast(value.view(-1), 1 - pair.rank).wait()  # the source is the other rank
        # `send` made the copy contiguous in NCHW order. Restore channels-last, because convolutions
        # select their kernel, and therefore their rounding, by memory format.
        last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
        return value.contiguous(memory_format=torch.channels_last) if last else value

    def wait_all(self) -> None:
        """Wait until all sent messages have been received."""
        for handle in list(self._in_flight):
            self.release(handle)

    def release_old(self) -> None:
        """Release the buffers of all messages except the newest `MOST_IN_FLIGHT`."""
        # Start with the oldest, which have most likely been received, so that the release does not
        # block.
        for handle in list(self._in_flight)[:-MOST_IN_FLIGHT]:
            self.release(handle)

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        self._local.clear()
        self._in_flight.clear()
