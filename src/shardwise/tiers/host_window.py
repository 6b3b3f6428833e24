"""Lets the host read and write flat tensors of any device piece by piece, for file transfers.

A tensor in host memory is used directly. A tensor on an accelerator passes through two pinned
blocks (`pieces.py`): while the file reads or writes one piece, the next one is copied.
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
"""Size of a piece in bytes. Checkpoint files are written in blocks of the same size."""


class HostWindow:
    """Reads and writes flat tensors on the host, using memory for only two pieces per device."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, tuple[CopyStream, StagingRing]] = {}

    def read(
        self, flat: Tensor, unused: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield `flat` in pieces, in order: the index of the piece's first element, and the piece.

        The caller may read a piece until it requests the next one. If other threads need a piece
        for longer, pass `unused`: it is called before the piece's memory is overwritten, and must
        wait until those threads have finished.
        """
        if flat.device.type == "cpu" or not _has_streams(flat.device):
            yield 0, flat.cpu()
            return
        copy_stream, ring = self._way(flat.device)
        # View as bytes, because the blocks of a ring are used for all dtypes.
        data, behind = flat.view(torch.uint8), [copy_stream.here()]
        with _ended(copy_stream, ring):
            for piece in pieces.down(copy_stream, ring, data, behind, unused):
                yield piece.first // flat.element_size(), piece.memory.view(flat.dtype)

    def write(self, flat: Tensor, *, fresh: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield pieces as `read` does, for the caller to modify.

        A piece is stored in `flat` when the caller requests the next one. If `fresh` is true,
        pieces start with arbitrary content instead of the content of `flat`.
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
                # The caller may change only part of the content, so load the rest first.
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
    """Return the copy stream that all windows share."""
    # Do not create one per checkpoint: torch has a pool of 32 streams, so later checkpoints would
    # share streams with unrelated work.
    return CopyStream(device)


@contextmanager
def _ended(copy_stream: CopyStream, ring: StagingRing) -> Iterator[None]:
    """Context manager that, on exit, makes the current stream wait for the copies of `ring`.

    Work on the current stream may then free or overwrite the memory, even after an error.
    """
    try:
        yield
    finally:
        for event in ring.copies:
            copy_stream.await_(event)


def _has_streams(device: torch.device) -> bool:
    """Return whether torch has streams for `device`. Only Apple's GPUs lack them."""
    return hasattr(torch.get_device_module(device), "Stream")
