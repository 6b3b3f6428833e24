"""Reusable buffers for transfers between a file, the host and a device.

Copies between a buffer and an accelerator are asynchronous. One may still be running when the
buffer is needed again, so each buffer keeps the events of its copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shardwise.tiers.host_memory import mapped


class Staging:
    """A buffer of `nbytes` for direct transfers.

    `tensor` (uint8) and `view` are the same bytes. They are `memory` if that is given, which is
    pinned for copies between it and an accelerator.
    """

    def __init__(self, nbytes: int, memory: Tensor | None = None) -> None:
        # Wiped in a forked DataLoader worker. Otherwise every later transfer here would make the
        # kernel copy pages for the worker, which never uses them.
        self.tensor = mapped(nbytes, wiped=True) if memory is None else memory
        self.view = self.tensor.numpy().data
        self.copies: list[Any] = []
        """Events of the last copies between this buffer and a device."""

    def settle(self) -> None:
        """Wait, in this thread, until no copy reads or writes the buffer."""
        settle(self.copies)
        self.copies = []


def settle(copies: Iterable[Any]) -> None:
    """Wait, in this thread, for the events `copies`."""
    for event in copies:
        event.synchronize()


class StagingRing:
    """Buffers of one size that one thread uses in turn, for a stream of bytes of any length."""

    def __init__(self, memories: Iterable[Tensor]) -> None:
        self._blocks = deque(Staging(memory.numel(), memory) for memory in memories)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def copies(self) -> list[Any]:
        """Events of the copies that still read or write a buffer."""
        return [event for block in self._blocks for event in block.copies]

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self._blocks[0].tensor.numel()

    def next(self) -> Staging:
        """Wait until no copy uses the least recently used buffer, and return it."""
        block = self._blocks[0]
        self._blocks.rotate(-1)
        block.settle()
        return block
