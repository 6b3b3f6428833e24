"""Reads and writes flat tensors of any device on the host, piece by piece, for files.

A tensor in host memory is used directly. A tensor on an accelerator passes through two pinned
blocks (`pieces.py`): one piece is in the file's transfer while the next one is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from shardwise.tiers import pieces
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.staging import StagingRing

PIECE = 8 * 2**20
"""Bytes of a piece, the same size in which a checkpoint's file is written."""


class HostWindow:
    """Reads and writes flat tensors on the host, with memory for two pieces per device."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, tuple[CopyStream, StagingRing]] = {}

    def read(
        self, flat: Tensor, unused: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements of `flat` in order: the first element of each piece, and the piece.

        The caller may read a piece until it asks for the next. Other threads may read it longer:
        `unused` is called before its memory changes, and must wait until they have finished.
        """
        if flat.device.type == "cpu" or not _has_streams(flat.device):
            yield 0, flat.cpu()
            return
        copy_stream, ring = self._way(flat.device)
        # As bytes, because the blocks of a ring are used for all dtypes.
        data, behind = flat.view(torch.uint8), [copy_stream.here()]
        with _ended(copy_stream, ring):
            for piece in pieces.down(copy_stream, ring, data, behind, unused):
                yield piece.first // flat.element_size(), piece.memory.view(flat.dtype)

    def write(self, flat: Tensor, *, fresh: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces as `read` does, which the caller changes.

        A piece is stored in `flat` when the caller asks for the next one. With `fresh` its content
        is arbitrary at first.
        """
        if flat.device.type == "cpu":
            yield 0, flat
        elif not _has_streams(flat.device):
            near = flat.cpu()
            yield 0, near
            flat.copy_(near)
        else:
            yield from self._up(flat, fresh=fresh)

    def _up(self, flat: Tensor, *, fresh: bool) -> Iterator[tuple[int, Tensor]]:
        copy_stream, ring = self._way(flat.device)
        data, behind = flat.view(torch.uint8), [copy_stream.here()]
        with _ended(copy_stream, ring):
            for piece in pieces.up(copy_stream, ring, data, behind):
                # The caller changes a part of the content, so it must be there first.
                if not fresh:
                    part = data[piece.first : piece.first + piece.nbytes]
                    copy_stream.start_down(part, piece.memory, behind).synchronize()
                yield piece.first // flat.element_size(), piece.memory.view(flat.dtype)

    def _way(self, device: torch.device) -> tuple[CopyStream, StagingRing]:
        if device not in self._ways:
            copy_stream = _copy_stream(device)
            self._ways[device] = copy_stream, copy_stream.ring(PIECE)
        return self._ways[device]


@cache
def _copy_stream(device: torch.device) -> CopyStream:
    """Return the copy stream of all windows."""
    # Not one for each checkpoint: torch has a pool of 32 streams, and later checkpoints would
    # share the streams of unrelated work.
    return CopyStream(device)


@contextmanager
def _ended(copy_stream: CopyStream, ring: StagingRing) -> Iterator[None]:
    """Context manager after which the current stream waits for all copies, even after an error.

    The memory may be freed or written then.
    """
    try:
        yield
    finally:
        for event in ring.copies:
            copy_stream.await_(event)


def _has_streams(device: torch.device) -> bool:
    """Return whether torch has streams for `device`, as for all but Apple's GPUs."""
    return hasattr(torch.get_device_module(device), "Stream")
