"""Runs collectives inside forwards and backwards in one order, the gather order, on all ranks.

Ranks may skip what others need, so a rank that waits in one collective must not be waited for in
another. Sharded units of several engines meet in one backward (a loss of one model that goes
through another one's), models are called inside of models, and BatchNorm over all ranks exchanges
statistics between two units. So there is one list of entries for all of a process
(agreed_order.py), and one pass at a time: a forward or backward that begins inside of another is a
part of it.

    backward of engine A's loss     A opens ─ B's units ─ B's BatchNorm ─ A's units ─ A closes
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from shardwise.comm.agreed_order import AgreedOrder
from shardwise.comm.base import Collectives


class Member(Protocol):
    """A member of the order: the units of an engine, or its modules that exchange statistics."""

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Run entry `number` with all ranks; `wanted` says whether this rank needs it itself."""

    def start_ahead(self, number: int) -> None:
        """Start early what entry `number` does, which comes next: what need not wait for it."""

    def is_past(self, number: int) -> None:
        """Note that entry `number` does not come again in the backward under way."""

    def end_dead_pass(self) -> None:
        """End the pass that this member has opened, if it has failed unnoticed."""

    def check(self) -> None:
        """Raise, on all ranks alike, where entries since the last call were in disorder."""

    def mode(self) -> Hashable:
        """What tells passes of one kind apart besides its key; alike on all ranks."""

    def set_aside(self) -> Callable[[], None]:
        """Forget for now what passes of this rank alone will change.

        Returns a function that brings it back.
        """


class GatherOrder:
    """The order of the entries of all engines in this process.

    `group` gives the ranks, over channels that carry nothing else.
    """

    def __init__(self, size: int, group: Callable[[], Collectives]) -> None:
        self._size = size
        self._group = group
        self._order = AgreedOrder(self._agree, alone=size == 1)
        self._members: WeakValueDictionary[int, Member] = WeakValueDictionary()
        self._firsts: list[int] = []
        self._modes: dict[int, Hashable] = {}
        self._opener: Member | None = None
        self._descending = False
        self._uneven = 0
        self.passes = 0
        """How many have begun."""

    @property
    def group(self) -> Collectives:
        """The ranks, over channels for what is run in this order. Collective at first use."""
        return self._group()

    def _agree(self, wanted: int) -> int:
        if self._size == 1:
            return wanted
        row = torch.tensor([float(wanted)], dtype=torch.float64, device=self.group.small_device)
        return int(self.group.gather_rows(row).min())

    # -- members -------------------------------------------------------------------------

    def join(
        self,
        member: Member,
        names: Sequence[str],
        *,
        staying: Sequence[int] = (),
        exchanges: bool = False,
    ) -> int:
        """Give `member` an entry for each of `names`; see AgreedOrder.join.

        Returns what is added to its numbers for `reach`, and what `leave` takes.
        """
        first = self._order.join(names, staying=staying, exchanges=exchanges)
        self._members[first] = member
        self._modes[first] = member.mode()
        self._firsts += [first] * len(names)
        return first

    def leave(self, first: int) -> None:
        """Remove a member."""
        self._members.pop(first, None)
        self._modes.pop(first, None)
        self._order.leave(first)

    # -- one pass -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._opener is not None

    @property
    def is_uneven(self) -> bool:
        """Whether ranks run what they like."""
        return self._uneven > 0

    def end_dead_pass(self) -> None:
        """End a pass that has failed unnoticed: a backward of the user's own."""
        if self._opener is not None:
            self._opener.end_dead_pass()

    def open(self, opener: Member, kind: Hashable, *, descending: bool) -> None:
        """Begin a pass of `opener`, or a part of the one under way; `kind` is alike on all ranks.

        `descending`: units are wanted from the last to the first.
        """
        if self._opener is not None:
            return
        self._opener = opener
        self.passes += 1
        # Where ranks are in passes of different kinds, their wishes must mean the same.
        self._descending = descending and not self.is_uneven
        # What is not in use any more is not freed at the same moment on all ranks: its mode stays.
        self._modes |= {first: member.mode() for first, member in self._members.items()}
        key = kind, tuple(self._modes.values())
        self._order.open(key, descending=self._descending, uneven=self.is_uneven)

    def close(self, opener: Member, expected: Sequence[int], *, failed: bool) -> None:
        """End the pass, if it is that of `opener`: run the entries that other ranks still need.

        `failed`: it has not come to its end. `expected` are entries that a later pass of this kind
        may need though none did now.
        """
        if self._opener is not opener:
            return
        try:
            if not self.is_uneven:
                for entry in self._order.rest(expected=expected, failed=failed):
                    self._run(entry, wanted=False)
        finally:
            self._opener = None

    def drop(self, opener: Member) -> None:
        """End the pass of `opener`, whatever other ranks need."""
        if self._opener is opener:
            self._opener = None

    def abandon(self) -> None:
        """End the pass under way at this entry, on all ranks."""
        self._opener = None

    def reach(self, entry: int) -> None:
        """Run all entries up to number `entry`, which this rank needs."""
        for each in self._order.until(entry):
            self._run(each, wanted=each == entry)

    def _run(self, entry: int, *, wanted: bool) -> None:
        over, first = self._order.over() if self._descending else None, self._firsts[entry]
        if over is not None and (member := self._of(over)) is not None:
            member.is_past(over - self._firsts[over])
        if (member := self._of(entry)) is not None:
            member.run_entry(entry - first, wanted=wanted)
        # After every entry, also on a rank that only catches up: so all ranks start gathers and
        # gradients in one order, as NCCL's communicators need it.
        following = self._order.next()
        if following is not None and (member := self._of(following)) is not None:
            member.start_ahead(following - self._firsts[following])

    def _of(self, entry: int) -> Member | None:
        """The member of an entry; None where that is not in use any more."""
        return self._members.get(self._firsts[entry])

    def check(self) -> None:
        """Raise, on all ranks alike, where entries since the last call were in disorder: what only
        an accelerator knew, for which the host has not waited. Called in a step, when it has."""
        for member in list(self._members.values()):
            member.check()

    # -- uneven passes --------------------------------------------------------------------

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Let each rank run as many forwards as it likes inside the block, of any engine's models.

        A rank that leaves the block runs the entries that others want until all have left. A block
        inside another one is part of that.
        """
        back = [member.set_aside() for member in list(self._members.values())]
        self._uneven += 1
        try:
            yield
        finally:
            self.end_dead_pass()
            self._uneven -= 1
            for bring in back:
                bring()
            if not self.is_uneven:
                for entry in self._order.serve():
                    self._run(entry, wanted=False)
