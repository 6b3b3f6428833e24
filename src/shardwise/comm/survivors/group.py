"""The group of all ranks of a run, whose transport is replaced when ranks are lost.

References to the group stay valid after a loss: only its `rank`, `size` and transport change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

from shardwise.comm.base import Collectives
from shardwise.comm.survivors import connecting, membership
from shardwise.comm.survivors.agreement import Agreement
from shardwise.comm.survivors.fence import Fence
from shardwise.comm.survivors.membership import Report
from shardwise.comm.survivors.replaceable import PassChannel, ReplaceableGroup
from shardwise.errors import CollectiveError, LaunchError, PeerLost

T = TypeVar("T")


class Loss(NamedTuple):
    """The outcome of losing ranks.

    Args:
        stands: True if all ranks have prepared the pending commit, in which case this rank
            completes it.
        lost: The lost ranks, by their numbers in the run.
        seconds: Time from the start of the agreement until all ranks had a new transport.
    """

    stands: bool
    lost: tuple[int, ...]
    seconds: float


class SurvivorGroup(ReplaceableGroup):
    """All remaining ranks of the run, over a transport that `replace` renews.

    Args:
        inner: The transport of all ranks, which must be CPU ranks on one host.
        timeout: Limit for every wait, in seconds.
        most: Maximum number of ranks that may be lost at once.

    Attributes:
        prepared: Number of commits that this rank could finish alone. A commit is a step, or a call
            of `steadily`.
        confirmed: Number of commits that every rank was prepared for, as far as this one knows.
        between_steps: Called after a loss in `steadily`.
        tolerates: Called if a rank is lost in a collective of a forward or backward pass. Returns
            True if the pass belongs to a step, which will be repeated.
    """

    def __init__(self, inner: Collectives, timeout: float, most: int) -> None:
        super().__init__(inner)
        self.members: tuple[int, ...] = tuple(range(inner.size))
        """The ranks of the run that are left. Their numbers in the run never change."""
        self.generation = 0
        self.prepared = self.confirmed = 0
        self.between_steps: Callable[[Loss], None] | None = None
        self.tolerates: Callable[[PeerLost], bool] = lambda error: False
        self._timeout = timeout
        self._most = most
        self._number = inner.rank
        self._run_size = inner.size
        self._store: connecting.RunStore | None = None
        self._made: list[Collectives] = []
        self._channels: list[PassChannel] = []
        self._changed: list[Callable[[], None]] = []
        self._is_steady = False
        self._agreement = Agreement(inner.status_server, connecting.ADDRESS)
        self._fence = Fence(inner.status_server, lambda: self.members, timeout / 2)

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
        """Return whether the run can continue if the ranks in `leaving` leave at once."""
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
            CollectiveError: More ranks are lost at once than the run tolerates, or a rank that has
                not exited does not take part.
        """
        began, before = time.monotonic(), self.members
        # Other ranks may wait for this one in the old transport. They notice that it is closed.
        for channel in self._channels:
            connecting.retire_channel(channel.inner)
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
                self._store, inner, channels = connecting.connect(
                    decision,
                    self._number,
                    self._run_size,
                    self.status_server,
                    listener,
                    memory,
                    len(self._channels),
                    self._timeout,
                )
            except (CollectiveError, LaunchError, RuntimeError, OSError):
                # Another rank ended before all had met. The ranks that are left agree again.
                ended = [r for r in decision.members if self.status_server.has_ended(r)]
                if not ended:
                    raise
                continue
            break
        self.adopt(inner)
        for channel, renewed in zip(self._channels, channels, strict=True):
            channel.adopt(renewed)
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

    def second_group(self) -> Collectives:
        channel = PassChannel(self.inner.second_group(), self._tolerate)
        self._channels.append(channel)
        return channel

    def _tolerate(self, error: PeerLost) -> bool:
        tolerates = self.tolerates(error)
        if tolerates:
            # The rest of the pass must not wait for ranks that already wait elsewhere.
            self.status_server.abort_too(error)
        return tolerates

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
