"""Publishes buffers in memory that all ranks of a host can read.

Other ranks read a tensor directly if it is in the arena. A tensor in private memory is first copied
to a buffer in the arena, which is reused in later calls. Small tensors are sent inside messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.arena import Arena
from shardwise.comm.base import Cuts
from shardwise.comm.shared_work import ENDED, GroupWork
from shardwise.comm.socket_mesh import MeshMessage
from shardwise.comm.torch_backend import real_view

POOLED = 1 << 25
"""Maximum size in bytes of a copy buffer that is kept for later calls."""


class SharedBuffers:
    """The buffers that rank `rank` of `size` publishes to its group, and those that it reads."""

    def __init__(self, arena: Arena, work: GroupWork, rank: int, size: int) -> None:
        self.arena = arena
        self._work = work
        self._rank = rank
        self._size = size
        self._announced: set[int] = set()
        self._spare: list[Tensor] = []
        self._borrowed: dict[int, Tensor] = {}
        """By address: the copy buffers in use. Their views of another dtype have no `_base`."""

    def place_for(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if all ranks can read it, else readable memory of the same length."""
        if not tensor.numel() or self.arena.locate(tensor) is not None:
            return tensor
        return self._borrow(tensor)

    def publish(
        self,
        begin: MeshMessage,
        tensor: Tensor,
        *,
        small: bool = False,
        written: bool = False,
        copy: bool = False,
    ) -> Tensor:
        """Publish `tensor`, or a copy that all ranks can read, and return the published tensor.

        The caller must not modify the published tensor until all ranks have finished the call that
        `begin` opens. If `written` is true, it may modify it, and other ranks see the changes. If
        `copy` is true, a copy is published in any case.
        """
        if small or not tensor.numel():
            self._work.post(begin._replace(payload=as_bytes(tensor)))
            return tensor
        public = tensor
        place = None if copy else self.arena.locate(tensor, written=written)
        if place is None:
            public = self._borrow(tensor)
            public.copy_(tensor)
            place = self.arena.locate(public)
            assert place is not None  # not forkable, so no fork makes it private
        segment, offset = place
        # The first message about a segment includes its descriptor, so that the other ranks can map
        # it.
        fd = -1 if segment.number in self._announced else segment.fd
        self._announced.add(segment.number)
        self._work.post(begin._replace(segment=segment.number, offset=offset, fd=fd))
        return public

    def take_back(self, public: Tensor, tensor: Tensor) -> None:
        """Return `public` to the pool after all ranks have read it, if it is a copy of `tensor`."""
        whole = None if public is tensor else self._borrowed.pop(public.data_ptr(), None)
        if whole is not None and whole.numel() <= POOLED:
            # Sort by size, so that `_borrow` finds the smallest buffer that is large enough.
            self._spare.append(whole)
            self._spare.sort(key=Tensor.numel)

    def announce_freed(self) -> None:
        """Tell the other ranks to unmap segments that this rank no longer uses."""
        for number in [n for n in self._announced if not self.arena.holds(n)]:
            self._announced.remove(number)
            self._work.post(MeshMessage(0, ENDED, segment=number))

    def read(self, rank: int, message: MeshMessage, first: int, like: Tensor) -> Tensor:
        """Return the values that `rank` published in `message`, starting at element `first`.

        The result has the length and dtype of `like`.
        """
        if not like.numel():
            return torch.empty(0, dtype=like.dtype)
        if message.payload:
            whole = torch.frombuffer(bytearray(message.payload), dtype=like.dtype)
            return whole[first : first + like.numel()]
        offset = message.offset + first * like.itemsize
        return self._work.segments.view(rank, message.segment, offset, like.numel(), like.dtype)

    def rows(self, messages: dict[int, MeshMessage], own: Tensor, first: int) -> list[Tensor]:
        """Return every rank's values for this rank's interval, which starts at element `first`."""
        return [
            own if rank == self._rank else self.read(rank, messages[rank], first, own)
            for rank in range(self._size)
        ]

    def close(self) -> None:
        """Free the pooled buffers."""
        self._spare.clear()
        self._borrowed.clear()

    def _borrow(self, like: Tensor) -> Tensor:
        """Return shared memory with the length and dtype of `like`, if possible from the pool."""
        whole = self._take(like.nbytes)
        self._borrowed[whole.data_ptr()] = whole
        return whole[: like.nbytes].view(like.dtype)

    def _take(self, size: int) -> Tensor:
        """Return at least `size` bytes from the pool or the arena."""
        for index, spare in enumerate(self._spare):
            if spare.numel() >= size:
                return self._spare.pop(index)
        # Use a separate segment, which is freed after the call. Inside the arena, such a large
        # range would remain reserved.
        if size > POOLED:
            return self.arena.allocate_alone(size, torch.uint8)
        # Round up to a power of two, so that tensors of similar size use the same buffers.
        return self.arena.allocate(1 << (size - 1).bit_length(), torch.uint8)


def real_buffer(buffer: Tensor, cuts: Cuts) -> tuple[Tensor, Cuts]:
    """View complex numbers as pairs of reals, and double the cuts accordingly."""
    return real_view(buffer), [2 * cut for cut in cuts] if buffer.is_complex() else cuts


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
