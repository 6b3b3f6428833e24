"""Buffers that bytes pass through between a file, the host and a device; each reused all the time.

A copy between a buffer and an accelerator does not stop the host, so it may still be on its way
when the buffer is wanted for something else: a buffer knows the events of its copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shardwise.tiers.host_memory import mapped


class Staging:
    """A buffer of `nbytes` for direct transfers, reused as long as its owner lives.

    `tensor` (uint8) and `view` are the same bytes: those of `memory` where that is given, pinned
    for copies between it and an accelerator.
    """

    def __init__(self, nbytes: int, memory: Tensor | None = None) -> None:
        # A forked DataLoader worker gets zeros in place of copies, which every later transfer
        # would make the kernel keep for it.
        self.tensor = mapped(nbytes, wiped=True) if memory is None else memory
        self.view = self.tensor.numpy().data
        self.copies: list[Any] = []
        """Events of the copies that were started last, from here to a device or back."""

    def settle(self) -> None:
        """Let this thread wait until no copy reads or writes the buffer any more."""
        settle(self.copies)
        self.copies = []


def settle(copies: Iterable[Any]) -> None:
    """Let this thread wait for the events of `copies`."""
    for event in copies:
        event.synchronize()


class StagingRing:
    """Buffers of one size, given in turn to one thread: all the memory that a stream of bytes of
    any length passes through."""

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
        """The buffer that was given longest ago, once no copy reads or writes it any more."""
        block = self._blocks[0]
        self._blocks.rotate(-1)
        block.settle()
        return block
