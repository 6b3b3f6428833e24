"""The memory that bytes pass through on their way to and from a disk."""

from __future__ import annotations

from shardwise.tiers.heap import mapped

PAGE = 4096
"""Bytes that direct transfers are aligned to: in memory, in the file and in length."""


class Staging:
    """A buffer of `nbytes` for direct transfers, reused as long as its owner lives.

    `tensor` (uint8) and `view` are the same bytes.
    """

    def __init__(self, nbytes: int) -> None:
        # A forked DataLoader worker gets zeros in place of copies, which every later transfer
        # would make the kernel keep for it.
        self.tensor = mapped(nbytes, wiped=True)
        self.view = self.tensor.numpy().data


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
