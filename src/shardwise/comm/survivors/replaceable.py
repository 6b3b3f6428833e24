"""Groups of all remaining ranks, whose transport is replaced after a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, Handle
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.errors import PeerLost

T = TypeVar("T")


class ReplaceableGroup(Collectives):
    """Passes all calls to the transport `inner`, which `adopt` replaces."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.rank, inner.size, inner.status_server)
        self.adopt(inner)

    def adopt(self, inner: Collectives) -> None:
        """Use the transport `inner` from now on."""
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.name, self.copies = inner.name, inner.copies
        self.sends_pieces, self.sums_onto = inner.sends_pieces, inner.sums_onto
        self.looks, self.in_one_order = inner.looks, inner.in_one_order

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, forkable: bool = False
    ) -> Tensor:
        return self.inner.allocate(numel, dtype, device, forkable=forkable)

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        return self.inner.all_reduce(buffer, how)

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        return self.inner.reduce_scatter(buffer, cuts, how, into=into)

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        return self.inner.all_reduce_pieces(pieces, buffer, how)

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        buffer: Tensor,
        cuts: Cuts,
        how: Sum = PLAIN,
        *,
        into: Tensor | None = None,
    ) -> Handle:
        return self.inner.reduce_scatter_pieces(pieces, buffer, cuts, how, into=into)

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        return self.inner.reduce_scatter_onto(own, buffer, cuts, how)

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self.inner.all_gather(buffer, cuts)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return self.inner.broadcast(buffer, source)

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        return self.inner.all_to_all(sent, counts, received)

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.inner.gather_rows(row)

    def barrier(self) -> None:
        self.inner.barrier()

    @property
    def small_device(self) -> torch.device:
        return self.inner.small_device

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return self.inner.split(groups)

    def close(self) -> None:
        self.inner.close()


class PassChannel(ReplaceableGroup):
    """The separate channel for gathers in forward and backward passes.

    A forward pass runs in the user's script, which cannot continue after an error. So if a rank is
    lost in a step, the pass continues without the other ranks: gathers leave the contents of their
    buffers unchanged. The results of these passes are discarded when the step is repeated.

    Args:
        inner: The channel's transport.
        tolerates: Called with the error that reports a lost rank. Returns True if the step will be
            repeated, and False to raise the error.
    """

    def __init__(self, inner: Collectives, tolerates: Callable[[PeerLost], bool]) -> None:
        super().__init__(inner)
        self._tolerates = tolerates
        self._is_cut = False
        """True from a loss until the transport is replaced."""

    def adopt(self, inner: Collectives) -> None:
        super().adopt(inner)
        self._is_cut = False

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        handle = self._attempt(lambda: self.inner.all_gather(buffer, cuts), Handle())
        return _TolerantHandle(handle, self._attempt)

    def gather_rows(self, row: Tensor) -> Tensor:
        # Agreements, such as the gather order, take the smallest number of all rows. With its own
        # row in place of the other ranks', a rank decides for itself.
        return self._attempt(lambda: self.inner.gather_rows(row), row.repeat(self.size, 1))

    def _attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of `call`, or `otherwise` if a rank is lost in the current step."""
        if not self._is_cut:
            try:
                return call()
            except PeerLost as error:
                if not self._tolerates(error):
                    raise
                self._is_cut = True
        return otherwise


class _TolerantHandle(Handle):
    """The handle of a gather that the loss of a rank may interrupt."""

    def __init__(self, inner: Handle, attempt: Callable[[Callable[[], None], None], None]) -> None:
        super().__init__(partial(attempt, inner.wait, None), partial(attempt, inner.advance, None))
        self._inner = inner
        self._attempt = attempt

    def is_there(self) -> bool:
        return self._inner.is_there()

    def reusable(self) -> None:
        self.wait()
        self._attempt(self._inner.reusable, None)
