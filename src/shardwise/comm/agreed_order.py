"""Agrees on the order in which all ranks run the collectives of forward and backward passes.

An *entry* of the order is a collective of all ranks during a forward or backward pass: gathering a
unit, or exchanging the statistics of a BatchNorm layer. Ranks may need different entries, for
example if one rank takes a branch of the model that another rank skips. Therefore all ranks run the
entries of a common list. A rank that needs an entry further down the list first takes part in the
preceding entries. At the end of its pass it takes part in the remaining entries:

    list          embed   a   b   c   head
    rank 0        embed   a       c   head       gathers b on the way to c, and frees it
    rank 1        embed   a   b       head       gathers c on the way to head, and frees it

Ranks agree on the list during the first pass. Each rank sends the entry that it needs next, and all
ranks run the one with the lowest number (in a backward pass, the highest). They repeat this until
all ranks have finished the pass. Units that no rank needed are inserted next to their neighbours,
because a later pass may take a different branch. If a pass fails on all ranks, it adds nothing to
the list.

A pass may need entries that its list does not provide: units in a different order, a unit twice, or
a backward pass through two forward passes that took different branches. So at the end of the list,
ranks ask each other whether any of them needs a further entry, and continue as in a first pass.
Once `SETTLED` consecutive passes of one kind have followed their list on all ranks, this kind is
*settled*: later passes follow the list without asking. A run with a single rank may run its entries
in any order.

Entries are numbered by member: first the units of one engine, then the units of the next. Engines
are ordered by their latest forward pass, which is the same on all ranks. Exchanges of statistics
have higher numbers than all units. Otherwise a rank could wait in an exchange while the other ranks
wait for it to gather a unit that it needs too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.errors import OrderError

SETTLED = 16
"""Number of consecutive passes of a kind that must follow their list before ranks stop asking."""


class _KnownOrder:
    """The list of entries for one kind of pass.

    `last` maps each entry to the index of its last occurrence. `kept` is the number of consecutive
    passes that have followed the list.
    """

    def __init__(self, entries: list[int]) -> None:
        self.entries = entries
        self.last = {entry: place for place, entry in enumerate(entries)}
        self.kept = 0


@dataclass(eq=False)
class _Member:
    """An engine's units, or its modules that exchange statistics.

    Entries are numbered consecutively, starting at `first`.
    """

    first: int
    names: Sequence[str]
    exchanges: bool
    numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = list(range(self.first, self.first + len(self.names)))


class AgreedOrder:
    """The order of the entries that all ranks run.

    `agree(wish)` is a small collective that returns the smallest `wish` of all ranks. If there are
    N entries, the values of `wish` mean:

        0 ... N - 1   the entry with this index in the order of preference
        N             this rank needs no further entry
        N + 1         no further entry, and its pass followed the list
        N + 2         no further entry, and its pass failed
    """

    def __init__(self, agree: Callable[[int], int], *, alone: bool = False) -> None:
        """Create an empty order. `alone` is True if there are no other ranks, and may change."""
        self._agree = agree
        self.alone = alone
        self._names: list[str] = []
        self._staying: set[int] = set()
        self._members: list[_Member] = []
        self._owners: list[_Member] = []
        self._by_use: list[_Member] = []
        self._known: dict[Hashable, _KnownOrder] = {}
        self._key: Hashable = None
        self._order: _KnownOrder | None = None
        self._taken: list[int] = []
        self._descending = self._uneven = False
        self._choices: list[int] | None = None
        self._goes_as_listed = True

    def join(
        self, names: Sequence[str], *, staying: Collection[int] = (), exchanges: bool = False
    ) -> int:
        """Add a member with the entries `names`, and return the number of its first entry.

        All ranks must add the same members. `staying` contains the indices in `names` of units that
        may still be gathered from an earlier pass.
        """
        member = _Member(len(self._names), names, exchanges)
        self._names += names
        self._staying |= {member.first + number for number in staying}
        self._owners += [member] * len(names)
        self._members.append(member)
        self._by_use.append(member)
        self._choices = None
        return member.first

    def leave(self, first: int) -> None:
        """Remove the member whose first entry is `first`, and discard the lists of all passes."""
        # Its numbers are not reused, so that the entries of other members keep theirs.
        self._members = [each for each in self._members if each.first != first]
        self._by_use = [each for each in self._by_use if each.first != first]
        self._known.clear()
        self._choices = None

    @property
    def end(self) -> int:
        """Number of entries of all members so far, including those that have left."""
        return len(self._names)

    def start_at(self, first: int) -> None:
        """Forget all members, and number the entries of later members from `first`.

        A rank that joins others calls it, because the others may have had more members.
        """
        gone = _Member(0, [""] * first, exchanges=False)
        self._names, self._owners = list(gone.names), [gone] * first
        self._staying, self._members, self._by_use = set(), [], []
        self._known.clear()
        self._choices = None

    def open(self, key: Hashable, *, descending: bool = False, uneven: bool = False) -> None:
        """Begin a pass of the kind `key`, which must be the same on all ranks.

        If `descending` is true, units are needed from last to first, as in a backward pass. If
        `uneven` is true, ranks may run different passes, so they agree on every entry.
        """
        self._descending, self._uneven, self._choices = descending, uneven, None
        self._key, self._order, self._taken = key, None if uneven else self._known.get(key), []
        self._goes_as_listed = True

    def until(self, entry: int) -> Iterator[int]:
        """Yield the entries to run now, the last of which is `entry`.

        Raises OrderError if `entry` is missing from the rest of a settled list.
        """
        left = self._left()
        before = left[: left.index(entry)] if entry in left else left
        if not self._staying.issuperset(before) or entry not in left:
            self._goes_as_listed = False
        if entry in left:
            yield from self._take([*before, entry])
            return
        # All ranks reach the end of the list before they ask. Otherwise a rank could wait in an
        # entry for a rank that is already asking.
        if not self._may_ask:
            raise self._out_of_order(entry)
        yield from self._take(left)
        taken = -1
        while taken != entry:
            taken = self._choice[self._agree(self._choice.index(entry))]
            yield from self._take([taken])

    def rest(self, *, expected: Sequence[int] = (), failed: bool = False) -> Iterator[int]:
        """Yield the entries that other ranks still need, and finish the pass.

        `expected` lists, in order, entries that this pass did not need, but that a later pass of
        this kind may need. `failed` is True if this rank's pass raised an exception.
        """
        left, wish = self._left(), -1  # a settled pass does not ask
        if not self._staying.issuperset(left):
            self._goes_as_listed = False
        yield from self._take(left)
        while self._may_ask:
            wish = self._agree(self.end + (2 if failed else self._goes_as_listed))
            if wish >= self.end:
                break
            self._goes_as_listed = False
            yield from self._take([self._choice[wish]])
        self._remember(wish, expected)
        self._order, self._taken = None, []

    def _remember(self, agreed: int, expected: Sequence[int]) -> None:
        """Update the list for this kind of pass.

        `agreed` is the result of the pass's last `agree` call, or -1 without such a call.
        """
        if self._order is None:
            # The smallest wish is returned, so this holds if the pass succeeded on any rank.
            if agreed < self.end + 2:
                seen, full = self._taken, list(expected)
                if self._descending:  # merge in the order of a forward pass
                    completed = with_unseen(seen[::-1], full[::-1])[::-1]
                else:
                    completed = with_unseen(seen, full)
                self._known[self._key] = _KnownOrder(completed)
        elif agreed >= 0:
            # A pass with units of several members is never settled, because the forward pass of
            # another engine decides which of its units the backward pass needs.
            owners = {self._owners[entry] for entry in self._taken}
            is_of_one = sum(not owner.exchanges for owner in owners) <= 1
            as_listed = agreed == self.end + 1 and is_of_one
            self._order.kept = self._order.kept + 1 if as_listed else 0
            self._known[self._key] = self._with_new(self._order)

    def _with_new(self, order: _KnownOrder) -> _KnownOrder:
        """Return `order` with this pass's missing entries inserted.

        Each is inserted before the first entry that follows it in the order of preference.
        """
        missing = [entry for entry in dict.fromkeys(self._taken) if entry not in order.last]
        if not missing:
            return order
        entries, place = list(order.entries), {entry: n for n, entry in enumerate(self._choice)}
        for entry in missing:
            later = (n for n, each in enumerate(entries) if place[each] > place[entry])
            entries.insert(next(later, len(entries)), entry)
        return _KnownOrder(entries)

    def _left(self) -> list[int]:
        """Return the entries of this pass's list that have not run yet."""
        return [] if self._order is None else self._order.entries[len(self._taken) :]

    def _take(self, entries: Iterable[int]) -> Iterator[int]:
        for entry in entries:
            self._taken.append(entry)
            owner = self._owners[entry]
            # Only forward passes that all ranks run move a member. A backward pass does not,
            # because it needs the order of the forward passes before it.
            if not self._descending and not self._uneven and owner is not self._by_use[-1]:
                self._by_use.remove(owner)
                self._by_use.append(owner)
            yield entry

    @property
    def _choice(self) -> list[int]:
        """All entries in the order of preference, which applies if ranks need different ones."""
        if self._choices is None:
            order = self._members if self._uneven else self._by_use
            units = [n for each in order if not each.exchanges for n in each.numbers]
            exchanges = [n for each in order if each.exchanges for n in each.numbers]
            step = -1 if self._descending else 1
            self._choices = units[::step] + exchanges[::step]
        return self._choices

    @property
    def _may_ask(self) -> bool:
        """True if ranks ask each other for further entries at the end of the list."""
        return self._order is None or self.alone or self._order.kept < SETTLED

    def serve(self) -> Iterator[int]:
        """Yield the entries that other ranks need in uneven passes, until no rank needs any."""
        self.open(None, uneven=True)
        while (wish := self._agree(self.end)) < self.end:
            yield self._choice[wish]

    def over(self) -> int | None:
        """Return the entry before the current one if this pass cannot need it again, else None.

        Ranks that run the same entries all return the same result.
        """
        if len(self._taken) < 2:
            return None
        # In a first pass the list is unknown: an entry that was run twice may be needed again.
        *before, entry, now = self._taken
        if self._order is None:
            return None if entry == now or entry in before else entry
        return entry if self._order.last.get(entry) == len(before) else None

    def next(self) -> int | None:
        """Return the next entry of the list, or None at its end."""
        left = self._left()
        return left[0] if left else None

    def _out_of_order(self, entry: int) -> OrderError:
        before = self._names[self._taken[-1]] if self._taken else "the start"
        what = "The statistics of" if self._owners[entry].exchanges else "Unit"
        return OrderError(
            f"{what} {self._names[entry]} is needed after {before}, but earlier passes did not "
            "need it there. All ranks gather sharded parameters together, in the same order. If "
            "ranks run different numbers of forwards (generation, evaluation on one rank), "
            "write: with engine.uneven(). If the order really changes, name larger units with "
            "--units, or replicate the parameters with --zero 2."
        )


def with_unseen(seen: Sequence[int], full: Sequence[int]) -> list[int]:
    """Return `seen`, with each missing unit of `full` inserted after its predecessor in `full`."""
    merged = list(seen)
    before: int | None = None
    for unit in full:
        if unit not in merged:
            merged.insert(0 if before is None else merged.index(before) + 1, unit)
        before = unit
    return merged
