"""Groups of all remaining ranks, whose transport is replaced after a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, Handle, Solo
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
        self.spoils_buffers = inner.spoils_buffers

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

    def all_gather_others(self, buffer: Tensor, cuts: Cuts, held: int) -> Handle:
        return self.inner.all_gather_others(buffer, cuts, held)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return self.inner.broadcast(buffer, source)

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        return self.inner.all_to_all(sent, counts, received)

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.inner.gather_rows(row)

    def barrier(self) -> None:
        self.inner.barrier()

    def settle(self) -> None:
        self.inner.settle()

    @property
    def small_device(self) -> torch.device:
        return self.inner.small_device

    @property
    def knows_tree(self) -> bool:
        return self.inner.knows_tree

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return self.inner.split(groups)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Parts:
    """All groups that were split from the group of all remaining ranks.

    Args:
        tolerates: Called with the error that reports a lost rank. Returns True if the step will be
            repeated, and False to raise the error.
    """

    tolerates: Callable[[PeerLost], bool]
    kept: list[PartGroup] = field(default_factory=list)
    """The parts that are connected again after a loss, in the order of their creation."""
    temporary: list[PartGroup] = field(default_factory=list)
    """The parts that are not used any more after a loss."""


class PartGroup(ReplaceableGroup):
    """A group that was split from the group of all remaining ranks, or from another part of it.

    After a loss, it has the same ranks except the lost ones.

    A forward pass runs in the user's script, which cannot continue after an error. So if a rank is
    lost in a step, the pass continues without the other ranks: collectives leave the contents of
    their buffers unchanged. The results of these passes are discarded when the step is repeated.

    Args:
        parent: The group to split.
        groups: The groups into which `parent` is split, by indices in `parent`. None for a group of
            all its ranks, which ranks that join later become part of.
        parts: The parts of the run, to which this one is added.
        is_temporary: True if the group is not used any more after a loss.
        inner: The transport. By default, `parent` is split.
    """

    def __init__(
        self,
        parent: ReplaceableGroup,
        groups: Sequence[Sequence[int]] | None,
        parts: Parts,
        *,
        is_temporary: bool = False,
        inner: Collectives | None = None,
    ) -> None:
        super().__init__(
            inner or parent.inner.split([range(parent.size)] if groups is None else groups)
        )
        self.status_server = parent.status_server
        self.parent = parent
        self._groups = None if groups is None else [[parent.places[i] for i in g] for g in groups]
        self._number = parent.places[parent.rank]
        self._is_cut = False
        """True from a loss until the transport is replaced."""
        self._raises = False
        """True while a loss is never tolerated."""
        self._parts = parts
        (parts.temporary if is_temporary else parts.kept).append(self)

    @property
    def is_whole(self) -> bool:
        """True if this group has all ranks of its parent."""
        return self._groups is None

    @property
    def places(self) -> Sequence[int]:
        return self.places_among(self.parent.places)

    def split_again(self, inner: Collectives, left: Sequence[int]) -> Collectives:
        """Return a new transport for this group. Collective.

        Args:
            inner: The new transport of the parent.
            left: The ranks that it connects, in order.
        """
        if self._groups is None:
            return inner.split([range(inner.size)])
        groups = [[left.index(rank) for rank in group if rank in left] for group in self._groups]
        return inner.split([group for group in groups if group])

    def places_among(self, left: Sequence[int]) -> Sequence[int]:
        """Return the ranks of this group that are in `left`, the remaining ranks of the parent."""
        if self._groups is None:
            return left
        mine = next((g for g in self._groups if self._number in g), [self._number])
        return [rank for rank in left if rank in mine]

    def adopt(self, inner: Collectives) -> None:
        super().adopt(inner)
        self._is_cut = False

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        # The two ends of a pipeline's channel may abandon a pass at different times, so they could
        # not connect the channel again together.
        alone: Collectives = Solo()
        inner = self._attempt(lambda: self.inner.split(groups), alone)
        part = PartGroup(self, groups, self._parts, is_temporary=True, inner=inner)
        part._is_cut = self._is_cut
        return part

    def second_group(self) -> Collectives:
        return PartGroup(self, None, self._parts)

    def close(self) -> None:
        for parts in (self._parts.kept, self._parts.temporary):
            if self in parts:
                parts.remove(self)
        super().close()

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        return self._launch(lambda: self.inner.all_reduce(buffer, how))

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        return self._launch(lambda: self.inner.reduce_scatter(buffer, cuts, how, into=into))

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], buffer: Tensor, how: Sum = PLAIN
    ) -> Handle:
        return self._launch(lambda: self.inner.all_reduce_pieces(pieces, buffer, how))

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        buffer: Tensor,
        cuts: Cuts,
        how: Sum = PLAIN,
        *,
        into: Tensor | None = None,
    ) -> Handle:
        return self._launch(
            lambda: self.inner.reduce_scatter_pieces(pieces, buffer, cuts, how, into=into)
        )

    def reduce_scatter_onto(
        self, own: Tensor, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN
    ) -> Handle:
        return self._launch(lambda: self.inner.reduce_scatter_onto(own, buffer, cuts, how))

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        return self._launch(lambda: self.inner.all_gather(buffer, cuts))

    def all_gather_others(self, buffer: Tensor, cuts: Cuts, held: int) -> Handle:
        return self._launch(lambda: self.inner.all_gather_others(buffer, cuts, held))

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        return self._launch(lambda: self.inner.broadcast(buffer, source))

    def all_to_all(self, sent: Tensor, counts: Counts, received: Tensor) -> Handle:
        return self._launch(lambda: self.inner.all_to_all(sent, counts, received))

    def gather_rows(self, row: Tensor) -> Tensor:
        # Agreements, such as the gather order, take the smallest number of all rows. With its own
        # row in place of the other ranks', a rank decides for itself.
        return self._attempt(lambda: self.inner.gather_rows(row), row.repeat(self.size, 1))

    def barrier(self) -> None:
        self._attempt(self.inner.barrier, None)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        # Unlike numbers, a pickle with arbitrary contents cannot be discarded later.
        outer, self._raises = self._raises, True
        try:
            return super()._gather_bytes(mine)
        finally:
            self._raises = outer

    def _launch(self, call: Callable[[], Handle]) -> Handle:
        return _TolerantHandle(self._attempt(call, Handle()), self._attempt)

    def _attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of `call`, or `otherwise` if a rank is lost in the current step."""
        if not self._is_cut:
            try:
                return call()
            except PeerLost as error:
                if self._raises or not self._parts.tolerates(error):
                    raise
                self._is_cut = True
        elif self._raises:
            raise PeerLost("A rank was lost earlier in this step.")
        return otherwise


class _TolerantHandle(Handle):
    """The handle of a collective that the loss of a rank may interrupt."""

    def __init__(self, inner: Handle, attempt: Callable[[Callable[[], None], None], None]) -> None:
        super().__init__()
        self._inner = inner
        self._attempt = attempt

    def advance(self) -> None:
        self._attempt(self._inner.advance, None)

    def is_there(self) -> bool:
        return self._inner.is_there()

    def wait(self) -> None:
        self._attempt(self._inner.wait, None)

    def reusable(self) -> None:
        self._attempt(self._inner.reusable, None)
