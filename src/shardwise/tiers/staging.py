"""Reusable buffers for transfers between a file, the host and a device.

Copies between a buffer and an accelerator are asynchronous. A copy may still be running when the
buffer is needed again, so each buffer stores its copies' events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shardwise.tiers.host_memory import mapped


class Staging:
    """A buffer of `nbytes` for direct transfers.

    `tensor` (uint8) and `view` share the same bytes. If `memory` is given, they are views of it. It
    should be pinned if the buffer is used for copies to or from an accelerator.
    """

    def __init__(self, nbytes: int, memory: Tensor | None = None) -> None:
        # Wipe the memory in forked DataLoader workers. Otherwise every later transfer here would
        # make the kernel copy pages for the worker, which never uses them.
        self.tensor = mapped(nbytes, wiped=True) if memory is None else memory
        self.view = self.tensor.numpy().data
        self.copies: list[Any] = []
        """Events of the latest copies between this buffer and a device."""

    def settle(self) -> None:
        """Block until no copy reads or writes the buffer."""
        settle(self.copies)
        self.copies = []


def settle(copies: Iterable[Any]) -> None:
    """Block until all events in `copies` have completed."""
    for event in copies:
        event.synchronize()


class StagingRing:
    """Buffers of equal size that one thread uses in turn, for a stream of bytes of any length."""

    def __init__(self, memories: Iterable[Tensor]) -> None:
        self._blocks = deque(Staging(memory.numel(), memory) for memory in memories)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def copies(self) -> list[Any]:
        """Events of the copies that may still read or write a buffer."""
        return [event for block in self._blocks for event in block.copies]

    @property
    def nbytes(self) -> int:
        """Size of one buffer in bytes."""
        return self._blocks[0].tensor.numel()

    def next(self) -> Staging:
        """Return the least recently used buffer, after waiting until no copy uses it."""
        block = self._blocks[0]
        self._blocks.rotate(-1)
        block.settle()
        return block
