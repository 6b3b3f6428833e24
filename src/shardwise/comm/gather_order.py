"""The gather order: one order, on all ranks, of the collectives inside forwards and backwards.

A rank may skip a collective that others need. Two ranks deadlock if each waits for the other in a
different collective. This could happen across engines: a backward may run through sharded units of
several engines (the loss of one model passes through another), models call other models, and
BatchNorm over all ranks exchanges statistics between two units. So each process has a single list
of entries (agreed_order.py) and runs one pass at a time. A forward or backward that begins inside
another is part of that pass.

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
        """Start the parts of entry `number`, the next one, that need not wait for its turn."""

    def is_past(self, number: int) -> None:
        """Note that the current backward does not need entry `number` again."""

    def end_dead_pass(self) -> None:
        """End the pass that this member has opened, if it has failed unnoticed."""

    def check(self) -> None:
        """Raise, on all ranks, if entries since the last call were out of order."""

    def mode(self) -> Hashable:
        """Return a value that distinguishes passes with the same key; it is equal on all ranks."""

    def set_aside(self) -> Callable[[], None]:
        """Save the state that this rank's uneven passes will change.

        Returns a function that restores it.
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
        """Group with channels for this order only. Collective at first use."""
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

        Returns the number of its first entry. Pass that number to `leave`, and that number plus the
        place of a name to `reach`.
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
        """Whether a pass is running."""
        return self._opener is not None

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may run different numbers of forwards."""
        return self._uneven > 0

    def end_dead_pass(self) -> None:
        """End a pass that has failed unnoticed, in a backward that the user's code called."""
        if self._opener is not None:
            self._opener.end_dead_pass()

    def open(self, opener: Member, kind: Hashable, *, descending: bool) -> None:
        """Begin a pass of `opener`, unless one is open; `kind` is equal on all ranks.

        `descending`: units are needed from the last to the first, as in a backward.
        """
        # A forward inside of another pass is a part of that: two passes at a time would have no
        # common order.
        if self._opener is not None:
            return
        self._opener = opener
        self.passes += 1
        # A wish is a place in the order of preference, which must be the same on all ranks even if
        # one is in a forward and another in a backward.
        self._descending = descending and not self.is_uneven
        # Members are collected at different moments on the ranks, so the modes of those that are
        # gone stay in the key.
        self._modes |= {first: member.mode() for first, member in self._members.items()}
        key = kind, tuple(self._modes.values())
        self._order.open(key, descending=self._descending, uneven=self.is_uneven)

    def close(self, opener: Member, expected: Sequence[int], *, failed: bool) -> None:
        """End the pass if `opener` began it: run the entries that other ranks still need.

        `failed`: the pass raised. `expected` lists entries that a later pass of this kind may need
        although this one did not.
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
        """End the pass of `opener` without running what other ranks need."""
        if self._opener is opener:
            self._opener = None

    def abandon(self) -> None:
        """End the current pass at this entry, on all ranks."""
        self._opener = None

    def reach(self, entry: int) -> None:
        """Run all entries up to number `entry`, which this rank needs."""
        for each in self._order.until(entry):
            self._run(each, wanted=each == entry)

    def _run(self, entry: int, *, wanted: bool) -> None:
        over, first = self._order.over() if self._descending else None, self._firsts[entry]
        if over is not None and (member := self._member_of(over)) is not None:
            member.is_past(over - self._firsts[over])
        if (member := self._member_of(entry)) is not None:
            member.run_entry(entry - first, wanted=wanted)
        # After every entry, even on a rank that only catches up: all ranks must start gathers and
        # sums of gradients in one order, because NCCL may deadlock otherwise.
        following = self._order.next()
        if following is not None and (member := self._member_of(following)) is not None:
            member.start_ahead(following - self._firsts[following])

    def _member_of(self, entry: int) -> Member | None:
        """Return the member of an entry; None if it has been collected."""
        return self._members.get(self._firsts[entry])

    def check(self) -> None:
        """Raise, on all ranks, if entries since the last call were out of order."""
        # On an accelerator the check reads device memory, for which the host must wait. A step
        # calls this when the host has waited anyway.
        for member in list(self._members.values()):
            member.check()

    # -- uneven passes --------------------------------------------------------------------

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Allow each rank its own number of forwards inside the block.

        A rank that leaves the block runs the entries that others need until all have left. Blocks
        may be nested.
        """
        restorers = [member.set_aside() for member in list(self._members.values())]
        self._uneven += 1
        try:
            yield
        finally:
            self.end_dead_pass()
            self._uneven -= 1
            for restore in restorers:
                restore()
            if not self.is_uneven:
                for entry in self._order.serve():
                    self._run(entry, wanted=False)
