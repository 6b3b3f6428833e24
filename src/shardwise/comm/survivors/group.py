"""The group of all ranks of a run, whose transport is replaced when ranks are lost.

References to the group stay valid after a loss: only its `rank`, `size` and transport change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Counts, Cuts, Handle
from shardwise.comm.ordered_sums import PLAIN, Sum
from shardwise.comm.survivors import connecting, membership
from shardwise.comm.survivors.agreement import Agreement
from shardwise.comm.survivors.fence import Fence
from shardwise.comm.survivors.membership import Report
from shardwise.errors import CollectiveError, LaunchError, PeerLost

T = TypeVar("T")


class Loss(NamedTuple):
    """The outcome after ranks were lost.

    Args:
        stands: True if the pending commit is prepared on all ranks, so that this rank finishes it.
        lost: The lost ranks, by their numbers in the run.
        seconds: Time from the start of the agreement until all ranks had a new transport.
    """

    stands: bool
    lost: tuple[int, ...]
    seconds: float


class SurvivorGroup(Collectives):
    """All remaining ranks of the run, over a transport that `replace` renews.

    Args:
        inner: The transport of all ranks, which must be CPU ranks on one host.
        timeout: Limit for every wait, in seconds.
        most: Number of ranks that may be lost at once.

    Attributes:
        prepared: Number of commits that this rank could finish alone. A step is a commit, and so
            is a call of `steadily`.
        confirmed: Number of commits that every rank was prepared for, as far as this one knows.
        between_steps: Called after a loss in `steadily`.
    """

    def __init__(self, inner: Collectives, timeout: float, most: int) -> None:
        super().__init__(inner.rank, inner.size, inner.status_server)
        self.inner = inner
        self.members: tuple[int, ...] = tuple(range(inner.size))
        """The ranks of the run that are left. Their numbers in the run never change."""
        self.generation = 0
        self.prepared = self.confirmed = 0
        self.between_steps: Callable[[Loss], None] | None = None
        self._timeout = timeout
        self._most = most
        self._number = inner.rank
        self._run_size = inner.size
        self._store: connecting.RunStore | None = None
        self._made: list[Collectives] = []
        self._changed: list[Callable[[], None]] = []
        self._is_steady = False
        self._agreement = Agreement(inner.status_server, connecting.ADDRESS)
        self._fence = Fence(inner.status_server, lambda: self.members, timeout / 2)
        self._adopt(inner)

    @property
    def places(self) -> Sequence[int]:
        return self.members

    def watch_members(self, changed: Callable[[], None]) -> None:
        self._changed.append(changed)

    def confirm(self, *, leaves: bool = False) -> tuple[int, ...]:
        """Wait until every rank is prepared for the same commit. Collective.

        Args:
            leaves: True if this rank leaves the run after the commit.

        Returns:
            The ranks that leave, by their numbers in the run.
        """
        self.prepared = self.confirmed + 1
        flags = torch.zeros(self.size)
        flags[self.rank] = float(leaves)
        # A rank calls this only once it could finish the commit alone. So a rank that has the sum
        # of all flags knows that the others can finish without it. A sum takes one message to each
        # rank, as a barrier does.
        handle = self.all_reduce(flags)
        handle.wait()
        handle.reusable()
        self.confirmed += 1
        return tuple(rank for rank, flag in zip(self.members, flags, strict=True) if flag)

    def allows(self, leaving: Sequence[int]) -> bool:
        """Return whether the run can continue if the ranks `leaving` leave at once."""
        return len(leaving) <= min(self._most, self.size - 1)

    def steadily(self, work: Callable[[], T]) -> T:
        if self._is_steady:
            return work()
        while True:
            self._is_steady = True
            try:
                found = work()
                self.confirm()
                return found
            except PeerLost:
                pass
            finally:
                self._is_steady = False
            # Not inside `except`, see RepeatableSteps.
            loss = self.replace()
            if self.between_steps is not None:
                self.between_steps(loss)
            if loss.stands:  # then `work` has returned on every rank
                return found

    def replace(self) -> Loss:
        """Agree on which ranks are left, and connect to them over a new transport. Collective.

        Raises:
            CollectiveError: More ranks are lost than the run may lose at once, or a rank that has
                not exited does not take part.
        """
        began, before = time.monotonic(), self.members
        # Other ranks may wait for this one in the old transport. They notice that it is closed.
        memory = connecting.retire(self.inner)
        with suppress(CollectiveError):
            for made in self._made:
                made.close()
        self._made.clear()
        if self._store is not None:
            self._store.close()
            self._store = None
        while True:
            mine = Report(
                rank=self._number,
                generation=self.generation,
                prepared=self.prepared,
                confirmed=self.confirmed,
            )
            decision, listener = self._agreement.reach(mine, before, self._timeout)
            self.generation = decision.generation
            try:
                membership.check_number(before, decision.members, self._most)
            except CollectiveError:
                if listener is not None:
                    listener.close()
                raise
            self.status_server.continue_with(decision.members, decision.generation)
            try:
                self._store, inner = connecting.connect(
                    decision,
                    self._number,
                    self._run_size,
                    self.status_server,
                    listener,
                    memory,
                    self._timeout,
                )
            except (CollectiveError, LaunchError, RuntimeError, OSError):
                # Another rank ended before all had met. The ranks that are left agree again.
                ended = [r for r in decision.members if self.status_server.has_ended(r)]
                if not ended:
                    raise
                continue
            break
        self._adopt(inner)
        self.rank, self.size = inner.rank, inner.size
        self.members = decision.members
        # A pickle's purpose contains the number of its call. Ranks disagree about this number after
        # a call has failed on only some of them.
        self._gathered = decision.generation << 32
        for changed in self._changed:
            changed()
        lost = tuple(rank for rank in before if rank not in decision.members)
        stands = membership.stands(decision, mine)
        self.prepared = self.confirmed = decision.confirmed
        return Loss(stands, lost, time.monotonic() - began)

    def _adopt(self, inner: Collectives) -> None:
        self.inner = inner
        self.name, self.copies = inner.name, inner.copies
        self.sends_pieces, self.sums_onto = inner.sends_pieces, inner.sums_onto
        self.looks, self.in_one_order = inner.looks, inner.in_one_order

    # -- the calls of the transport ---------------------------------------------------------

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
        # A group that outlives the next loss would wait for a rank that has ended. So callers that
        # keep one are refused at the start (`world/survival.py`).
        made = self.inner.split(groups)
        self._made.append(made)
        return made

    def close(self) -> None:
        self._fence.close()
        self.inner.close()
        if self._store is not None:
            self._store.close()
            self._store = None
