"""Runs the collectives of forward and backward passes in the same order on all ranks.

A rank may skip a collective that others need. Two ranks deadlock if each waits for the other in a
different collective. This can also happen across engines: a backward pass may run through sharded
units of several engines (if the loss of one model depends on another model), models may call other
models, and synchronised BatchNorm exchanges statistics between two units. So each process has a
single list of entries (see agreed_order.py) and runs one pass at a time. A forward or backward pass
that begins inside another pass is part of that pass.

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
    """The units of an engine, or those of its modules that exchange statistics."""

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Run entry `number` of this member with all ranks. `wanted`: this rank needs it."""

    def start_ahead(self, number: int) -> None:
        """Start those parts of the next entry, `number`, that need not wait for their turn."""

    def is_past(self, number: int) -> None:
        """Called when the current backward pass will not need entry `number` again."""

    def end_dead_pass(self) -> None:
        """End the pass that this member opened, if that pass failed without being closed."""

    def check(self) -> None:
        """Raise on all ranks if any entry since the last call was out of order."""

    def mode(self) -> Hashable:
        """Return a value, identical on all ranks, that distinguishes passes of the same kind."""

    def set_aside(self) -> Callable[[], None]:
        """Save the state that this rank's uneven passes will change.

        Returns a function that restores the state.
        """


class GatherOrder:
    """Runs the entries of all engines in this process, in the order that all ranks follow.

    `group` returns the group of ranks that agree on the order. Its channels must not be used for
    anything else.
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
        """Number of passes that have begun."""

    @property
    def group(self) -> Collectives:
        """Group whose channels are reserved for this order. Collective at first use."""
        return self._group()

    def _agree(self, wanted: int) -> int:
        if self._size == 1:
            return wanted
        row = torch.tensor([float(wanted)], dtype=torch.float64, device=self.group.small_device)
        return int(self.group.gather_rows(row).min())

    def follow(self, size: int) -> None:
        """Continue with the `size` ranks that remain after a loss, with an empty order."""
        self._size = size
        self._order.alone = size == 1
        self.abandon()

    @property
    def entries(self) -> int:
        """Number of entries so far, including those of members that have left."""
        return self._order.end

    def start_at(self, entries: int) -> None:
        """Forget all members, and number later ones as ranks do that have had `entries`."""
        self._order.start_at(entries)
        self._members.clear()
        self._modes.clear()
        self._firsts = [0] * entries

    # -- members -------------------------------------------------------------------------

    def join(
        self,
        member: Member,
        names: Sequence[str],
        *,
        staying: Sequence[int] = (),
        exchanges: bool = False,
    ) -> int:
        """Add one entry to `member` for each of `names`. See `AgreedOrder.join`.

        Returns the number of the first entry. Pass this number to `leave`. For `reach`, add the
        index of the entry's name in `names`.
        """
        first = self._order.join(names, staying=staying, exchanges=exchanges)
        self._members[first] = member
        self._modes[first] = member.mode()
        self._firsts += [first] * len(names)
        return first

    def leave(self, first: int) -> None:
        """Remove the member whose first entry is `first`."""
        self._members.pop(first, None)
        self._modes.pop(first, None)
        self._order.leave(first)

    # -- one pass -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while a pass is running."""
        return self._opener is not None

    @property
    def is_uneven(self) -> bool:
        """True if ranks may run different numbers of forward passes."""
        return self._uneven > 0

    def end_dead_pass(self) -> None:
        """End a pass that was left open because a backward pass in user code failed."""
        if self._opener is not None:
            self._opener.end_dead_pass()

    def open(self, opener: Member, kind: Hashable, *, descending: bool) -> None:
        """Begin a pass of `opener`, unless a pass is already running.

        All ranks must pass the same `kind`. If `descending` is true, units are needed from last to
        first, as in a backward pass.
        """
        # A forward pass inside another pass is part of it, because two concurrent passes would have
        # no common order.
        if self._opener is not None:
            return
        self._opener = opener
        self.passes += 1
        # A wish is an index into the order of preference, which must be the same on all ranks even
        # if one is in a forward pass and another in a backward pass.
        self._descending = descending and not self.is_uneven
        # Ranks collect dead members at different times, so the key still contains the modes of
        # members that no longer exist.
        self._modes |= {first: member.mode() for first, member in self._members.items()}
        key = kind, tuple(self._modes.values())
        self._order.open(key, descending=self._descending, uneven=self.is_uneven)

    def close(self, opener: Member, expected: Sequence[int], *, failed: bool) -> None:
        """Run the entries that other ranks still need, and end the pass.

        No-op if another member opened the pass. `failed` is True if the pass raised an exception.
        `expected` lists entries that this pass did not need, but that a later pass of this kind may
        need.
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
        """End `opener`'s pass. Its remaining entries are skipped, even if other ranks need them."""
        if self._opener is opener:
            self._opener = None

    def abandon(self) -> None:
        """End the current pass without running its remaining entries.

        All ranks must call this after the same entry.
        """
        self._opener = None

    def reach(self, entry: int) -> None:
        """Run all entries up to `entry`, which this rank needs."""
        for each in self._order.until(entry):
            self._run(each, wanted=each == entry)

    def _run(self, entry: int, *, wanted: bool) -> None:
        over, first = self._order.over() if self._descending else None, self._firsts[entry]
        if over is not None and (member := self._member_of(over)) is not None:
            member.is_past(over - self._firsts[over])
        if (member := self._member_of(entry)) is not None:
            member.run_entry(entry - first, wanted=wanted)
        # Do this after every entry, even on a rank that only catches up. All ranks must start
        # gathers and gradient sums in the same order, because NCCL may deadlock otherwise.
        following = self._order.next()
        if following is not None and (member := self._member_of(following)) is not None:
            member.start_ahead(following - self._firsts[following])

    def _member_of(self, entry: int) -> Member | None:
        """Return the member that owns an entry, or None if it has been garbage-collected."""
        return self._members.get(self._firsts[entry])

    def check(self) -> None:
        """Raise on all ranks if any entry since the last call was out of order."""
        # On an accelerator, the check copies from device memory, which blocks the host. A step
        # calls it when the host has just waited anyway.
        for member in list(self._members.values()):
            member.check()

    # -- uneven passes --------------------------------------------------------------------

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Allow each rank to run its own number of forward passes inside the block.

        A rank that leaves the block runs the entries that other ranks need, until all ranks have
        left it. Blocks may be nested.
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
