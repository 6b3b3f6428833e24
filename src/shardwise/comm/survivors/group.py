"""The group of all ranks of a run, whose transport is replaced when ranks are lost.

References to the group stay valid after a loss: only its `rank`, `size` and transport change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import torch

from shardwise.comm.abortable_nccl import AbortableNccl
from shardwise.comm.arena import Arena
from shardwise.comm.base import Collectives
from shardwise.comm.hierarchical import Hierarchical
from shardwise.comm.shared_memory import SharedMemory
from shardwise.comm.survivors import connecting, membership
from shardwise.comm.survivors.admission import Admission, Applicant, Entry, publish_members
from shardwise.comm.survivors.agreement import Agreement, NotAdmitted
from shardwise.comm.survivors.lost_hosts import LostHosts
from shardwise.comm.survivors.membership import Divisions, Report
from shardwise.comm.survivors.replaceable import PartGroup, Parts, ReplaceableGroup
from shardwise.errors import CollectiveError, LaunchError, PeerLost
from shardwise.watch.status_server import RankAddress

_JOINS = 2.0
"""Added to a rank's flag in a confirmation if it knows of spares that wait to join."""

REST = 3
"""Number of steps that a leaving rank waits for the other ranks of its host to leave too."""

T = TypeVar("T")


class Loss(NamedTuple):
    """The outcome of losing ranks.

    Args:
        stands: True if all ranks have prepared the pending commit. This rank then completes it.
        lost: The lost ranks, by their numbers in the run.
        admits: True if spares could join, because all ranks hold the full states. No rank needs
            the second copies then.
        seconds: Time from the start of the agreement until all ranks had a new transport.
    """

    stands: bool
    lost: tuple[int, ...]
    admits: bool
    seconds: float


def copied_places(group: Collectives) -> list[int]:
    """Return, for each rank of `group`, the rank that holds the second copy of its states."""
    return membership.copy_places(group.status_server.hosts_of(group.places))


class SurvivorGroup(ReplaceableGroup):
    """All remaining ranks of the run, over a transport that `replace` renews.

    Args:
        inner: The transport of all ranks.
        timeout: Limit for every wait, in seconds.
        most: Maximum number of ranks that may be lost at once. A host that loses all of its ranks
            counts once.
        spares: Number of ranks that wait to replace lost ones.
        number: This rank's number in the run if it is a spare. `inner` then has one rank.

    Attributes:
        is_waiting: True if this rank is a spare that has not joined the others.
        divisions: The sets of ranks that can train together.
        surplus: Ranks that cannot train with the others after a loss. They hold a part of the
            states, so they leave once the others have gathered these.
        joins_due: True if spares wait to join, as all ranks know from the last confirmation.
        prepared: Number of commits that this rank could finish alone. A commit is a step, or a call
            of `steadily`.
        stop_limit: Maximum time in seconds for which a rank may be stopped. The launcher then kills
            it.
        confirmed: Number of commits that every rank was prepared for, as far as this one knows.
        admission: The generation of the latest group that spares have joined, or 0.
        between_steps: Called after a loss in `steadily`.
        tolerates: Called if a rank is lost in a collective of a forward or backward pass. Returns
            True if the pass belongs to a step, which will be repeated.
    """

    def __init__(
        self,
        inner: Collectives,
        timeout: float,
        most: int,
        *,
        spares: int = 0,
        number: int | None = None,
        run_size: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.is_waiting, self.joins_due = number is not None, False
        self.members: tuple[int, ...] = tuple(range(inner.size)) if number is None else (number,)
        """The ranks of the run that are left. Their numbers in the run never change."""
        self._trained = self.members
        """The members in the latest group without surplus ranks."""
        self.generation = self.admission = 0
        self.prepared = self.confirmed = 0
        self.between_steps: Callable[[Loss], None] | None = None
        self.tolerates: Callable[[PeerLost], bool] = lambda error: False
        self.divisions = Divisions()
        self.surplus: tuple[int, ...] = ()
        self._timeout, self.stop_limit = timeout, timeout / 2
        self._most = most
        self._number = inner.rank if number is None else number
        self._run_size = inner.size + spares if run_size is None else run_size
        self._full_size = self._run_size - spares
        """Largest number of ranks so far. Lost ones are replaced up to this number."""
        self._shares = isinstance(inner, SharedMemory | Hierarchical)
        self._device = inner.device if isinstance(inner, AbortableNccl) else None
        self._memory: Arena | None = None
        """Shared memory of an earlier transport, while this rank is alone."""
        self._store: connecting.RunStore | None = None
        self._parts = Parts(self._tolerate)
        self._changed: list[Callable[[], None]] = []
        self._is_steady = False
        self._awaited = 0
        """Number of steps that leaving ranks have waited for the other ranks of their host."""
        server = inner.status_server
        self._agreement = Agreement(server, server.places_of([self._number])[0].address)
        self._admission = Admission(inner.status_server)
        if number is None:
            self._publish()
        self._lost_hosts = LostHosts(server)

    @property
    def places(self) -> Sequence[int]:
        return self.members

    @property
    def leads(self) -> bool:
        # A spare must not repeat the output of the main rank.
        return self.rank == 0 and not self.is_waiting

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
        flags[self.rank] = float(leaves) + _JOINS * bool(self.rank == 0 and self._invitable())
        # A rank calls this only once it could finish the commit alone. So a rank that has the sum
        # of all flags knows that the others can finish without it. A sum takes one message to each
        # rank, as a barrier does.
        handle = self.all_reduce(flags)
        handle.wait()
        handle.reusable()
        self.confirmed += 1
        self.joins_due = bool(flags[0] >= _JOINS)
        return tuple(rank for rank, flag in zip(self.members, flags, strict=True) if flag % _JOINS)

    def allows(self, leaving: Sequence[int]) -> bool:
        """Return whether the run can continue if the ranks in `leaving` leave at once."""
        left = [rank for rank in self.members if rank not in leaving]
        losses = membership.count_losses(leaving, self._hosts)
        return losses <= self._most and bool(self.divisions.usable(self._trained, left))

    def awaits_more(self, leaving: Sequence[int]) -> bool:
        """Return whether the ranks in `leaving` wait one more step for the others of their host.

        Call this once for each confirmation, on all ranks.
        """
        # A signal to all ranks of a host reaches some of them a step earlier than others.
        waits = self._awaited < REST and membership.are_first_of_host(
            leaving, self._hosts, self._most
        )
        self._awaited = self._awaited + 1 if waits else 0
        return waits

    @property
    def _hosts(self) -> dict[int, str]:
        """The host of each member."""
        return dict(zip(self.members, self.status_server.hosts_of(self.members), strict=True))

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

    # -- spares -------------------------------------------------------------------------------

    def _invitable(self) -> list[RankAddress]:
        """Return the spares that may join now."""
        waiting = self._admission.waiting(self._full_size - self.size, self.members)
        return self._joining(waiting)

    def _joining(self, spares: list[RankAddress]) -> list[RankAddress]:
        """Return as many of `spares` as can train together with the members."""
        return spares[: max(0, self.divisions.fit(self.size + len(spares)) - self.size)]

    def invite(self, offer: Mapping[str, Any]) -> list[RankAddress]:
        """Ask waiting spares to load a checkpoint, and return those that have done so. Collective.

        Args:
            offer: The "id" of the offer, and a "record" that describes the checkpoint.
        """
        mine = [asdict(place) for place in self._invitable()]
        spares = [RankAddress(**place) for place in self.gather_plain(mine)[0]]
        self._admission.invite(spares, offer)
        ready: list[RankAddress] = []
        if self.rank == 0:
            ready = self._admission.wait_until_ready(spares, self._timeout / 2)
            ready = self._joining(ready)
        found = self.gather_plain([asdict(place) for place in ready])[0]
        return [RankAddress(**place) for place in found]

    def admit(self, spares: Sequence[RankAddress], state: Mapping[str, Any]) -> Loss:
        """Connect to the remaining ranks and to `spares`, as `replace` does. Collective.

        Every rank has gathered the full states before. `state` is passed to the spares.
        """
        server = self.status_server
        entry = Entry(
            run=server.run_name,
            generation=self.generation,
            confirmed=self.confirmed,
            members=tuple(server.places_of(self.members)),
            spares=tuple(spares),
            full_size=self._full_size,
            shares=self._shares,
            channels=sum(part.is_whole for part in self._parts.kept),
            state=state,
        )
        server.introduce(spares)
        self._admission.admit(entry)
        loss = self.replace([place.rank for place in spares])
        if loss.admits:
            self._full_size = max(self._full_size, self.size)
            self.dismiss([place.rank for place in spares])
        return loss

    def dismiss(self, spares: Sequence[int] = ()) -> None:
        """End an admission, after which `spares` no longer wait."""
        self._admission.finish(spares)
        self.joins_due = False

    def apply(self) -> Mapping[str, Any]:
        """Wait until the other ranks offer this spare a checkpoint, and return its record."""
        self._applicant = Applicant(
            self.status_server, self.status_server.places_of([self._number])[0], self._timeout
        )
        return self._applicant.wait_for_offer()

    def enter(self) -> Mapping[str, Any]:
        """Join the other ranks, and return the `state` that they passed. Collective.

        Raises LaunchError if they have gone on without this rank.
        """
        while True:
            entry = self._applicant.wait_for_entry()
            self.status_server.introduce([*entry.members, *entry.spares], entry.run)
            self.generation = entry.generation
            self.prepared = self.confirmed = entry.confirmed
            self._shares = entry.shares
            if entry.channels != (channels := len(self._parts.kept)):
                raise LaunchError(
                    f"Spare rank {self._number} has {channels} channels, and the other ranks have "
                    f"{entry.channels}: the script has built other models here."
                )
            self.members = self._trained = tuple(place.rank for place in entry.members)
            try:
                self.replace([place.rank for place in entry.spares])
            except NotAdmitted:
                continue
            self.is_waiting = False
            self._full_size = max(entry.full_size, self.size)
            return entry.state

    def _publish(self) -> None:
        if self.rank == 0:
            with suppress(OSError):  # a full disk: no spare can join
                publish_members(self.status_server.places_of(self.members), self.generation)

    # -- after a loss -------------------------------------------------------------------------

    def replace(self, spares: Sequence[int] = ()) -> Loss:
        """Agree on which ranks are left, and connect to them over a new transport. Collective.

        Args:
            spares: Ranks that join. This rank holds the full states, unless it is one of them.

        Raises:
            CollectiveError: More ranks are lost at once than the run tolerates, or a rank that has
                not exited does not take part.
        """
        began, before, hosts = time.monotonic(), self.members, self._hosts
        # Other ranks may wait for this one in the old transport. They notice that it is closed.
        parts = self._parts
        for part in (*parts.kept, *parts.temporary):
            connecting.retire_part(part.inner)
        parts.temporary.clear()
        if spares:  # they have taken part in no split
            parts.kept[:] = [part for part in parts.kept if part.is_whole]
        self._memory = connecting.retire(self.inner) or self._memory
        if self._store is not None:
            self._store.close()
            self._store = None
        present, joining = before, tuple(spares)
        while True:
            mine = Report(
                rank=self._number,
                generation=self.generation,
                prepared=self.prepared,
                confirmed=self.confirmed,
                admits=tuple(spares),
            )
            decision, listener = self._agreement.reach(mine, present, self._timeout, joining)
            self.generation = decision.generation
            try:
                expected = {rank: hosts[rank] for rank in before if rank not in self.surplus}
                membership.check_number(expected, decision.members, self._most)
                usable = self.divisions.usable(self._trained, decision.members)
                lost = tuple(rank for rank in before if rank not in decision.members)
                self.divisions.check_left(usable, lost)
            except CollectiveError:
                if listener is not None:
                    listener.close()
                raise
            self.status_server.continue_with(decision.members, decision.generation)
            # From now on this rank does not know the processes of the others.
            present = tuple(rank for rank in present if rank in decision.members)
            joining = tuple(rank for rank in joining if rank in decision.members)
            try:
                self._store, inner, inners = connecting.connect(
                    decision,
                    self._number,
                    self._run_size,
                    self.status_server,
                    listener,
                    self._memory,
                    self._shares,
                    self._device,
                    parts.kept,
                    self._timeout,
                    in_tree=bool(self.divisions.sizes),
                )
            except (CollectiveError, LaunchError, RuntimeError, OSError):
                # Another rank ended before all had met. The ranks that are left agree again.
                server = self.status_server
                if not connecting.wait_for_end(decision.members, server, self._timeout):
                    raise
                continue
            break
        self.adopt(inner)
        for part, renewed in zip(parts.kept, inners, strict=True):
            part.adopt(renewed)
        self.members = decision.members
        self.surplus = tuple(rank for rank in decision.members if rank not in usable)
        if not self.surplus:
            self._trained = decision.members
        # A pickle's purpose contains the number of its call. Ranks disagree about this number after
        # a call has failed on only some of them.
        for group in (self, *parts.kept):
            group._gathered = decision.generation << 32
        for changed in self._changed:
            changed()
        stands = membership.stands(decision, mine)
        if decision.admits:
            self.admission = decision.generation
        self.prepared = self.confirmed = decision.confirmed
        self.joins_due = False
        self._awaited = 0  # some ranks may not have received the last confirmation
        self._publish()
        return Loss(stands, lost, decision.admits, time.monotonic() - began)

    def second_group(self) -> Collectives:
        return PartGroup(self, None, self._parts)

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return PartGroup(self, groups, self._parts)

    def _tolerate(self, error: PeerLost) -> bool:
        tolerates = self.tolerates(error)
        if tolerates:
            # The rest of the pass must not wait for ranks that already wait elsewhere.
            self.status_server.abort_too(error)
        return tolerates

    def close(self) -> None:
        self._lost_hosts.close()
        self.inner.close()
        if self._store is not None:
            self._store.close()
            self._store = None
