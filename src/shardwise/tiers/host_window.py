"""Shows flat tensors of any device to the host, piece by piece, for a file to be written or read.

What lies in the host's memory is shown as it lies. What lies on an accelerator passes through two
pinned blocks (`pieces.py`): the file has one piece while the next one is on its way.
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
"""Bytes of a piece: what a checkpoint's file is written in."""


class HostWindow:
    """Reads and writes flat tensors from the host; two pieces of memory for each device."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, tuple[CopyStream, StagingRing]] = {}

    def read(
        self, flat: Tensor, unused: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Tensor]]:
        """The elements of `flat`, in order: by piece its first element, and the piece on the host.

        It may be read until the next is asked for; by others until `unused`, which is called before
        its memory changes, has returned.
        """
        if flat.device.type == "cpu" or not _has_streams(flat.device):
            yield 0, flat.cpu()
            return
        copy_stream, ring = self._way(flat.device)
        # By bytes: the blocks of a ring serve tensors of every dtype.
        data, behind = flat.view(torch.uint8), [copy_stream.here()]
        with _ended(copy_stream, ring):
            for piece in pieces.down(copy_stream, ring, data, behind, unused):
                yield piece.first // flat.element_size(), piece.memory.view(flat.dtype)

    def write(self, flat: Tensor, *, fresh: bool) -> Iterator[tuple[int, Tensor]]:
        """Pieces as `read` has them, to be changed: they are `flat`, or go there when the next one
        is asked for. `fresh`: with anything in them."""
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
    # torch has a pool of 32 streams: with one per checkpoint, later ones would share those of
    # unrelated work.
    return CopyStream(device)


@contextmanager
def _ended(copy_stream: CopyStream, ring: StagingRing) -> Iterator[None]:
    """A block after which the present stream comes behind the copies, also where whoever was shown
    the pieces has failed: the memory may then be freed, or written."""
    try:
        yield
    finally:
        for event in ring.copies:
            copy_stream.await_(event)


def _has_streams(device: torch.device) -> bool:
    """Whether torch has streams for such a device; for Apple's it has none."""
    return hasattr(torch.get_device_module(device), "Stream")
