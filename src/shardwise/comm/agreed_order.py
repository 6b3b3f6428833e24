"""Agrees on one order of collectives inside forwards and backwards, alike on all ranks.

An *entry* of the order is a collective of all ranks inside a forward or backward: the gather of a
unit, or the exchange of a BatchNorm's statistics. But ranks may need different ones: one skips a
branch, another takes it. So all ranks run the entries of one list. A rank that needs an entry
further down the list takes part in those before it on the way ("catching up"), and in what is left
when its pass ends:

    list          embed   a   b   c   head
    rank 0        embed   a       c   head       b is gathered on the way to c, and let go
    rank 1        embed   a   b       head       so is c, on the way to head

The list of a pass is agreed upon the first time: each rank sends which entry it wants next, the
first of these by number (in a backward the last) is run by all, and so on until all ranks have
ended the pass. Units that no rank wanted then are put beside their neighbours, since a later pass
may take another branch. A pass that failed on all ranks teaches nothing.

A pass may need more than the list of its kind has: units in another order, one of them twice, a
backward over two forwards that took different branches. So when the list has ended ranks ask each
other whether any of them wants something still, and go on as in a first pass. Once a kind of pass
has gone as its list says for `SETTLED` times on all ranks, it is *settled*: later ones follow the
list and ask nothing. For a rank that is alone no order is wrong.

Entries are numbered by member: the units of one engine, those of the next. Engines stand in the
order in which forwards came to them last, which is the same on all ranks. Exchanges come after all
units: a rank that waits in one would else leave a unit to the others that it needs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.errors import OrderError

SETTLED = 16
"""So many passes of a kind in a row must go as their list says until ranks stop asking."""


class _KnownOrder:
    """The list of a kind of pass.

    `last` has the last place of each entry; `kept` counts the passes in a row that went as listed.
    """

    def __init__(self, entries: list[int]) -> None:
        self.entries = entries
        self.last = {entry: place for place, entry in enumerate(entries)}
        self.kept = 0


@dataclass(eq=False)
class _Member:
    """A member of the order: its entries, from number `first` on."""

    first: int
    names: Sequence[str]
    exchanges: bool
    numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = list(range(self.first, self.first + len(self.names)))


class AgreedOrder:
    """The entries that all ranks run, in one pass after the other; `agree` is collective and small.

    `agree(wanted)` sends this rank's wish and returns the smallest of all ranks' wishes: the place
    of an entry in the order of first choice. The number of entries is the wish for nothing more,
    one more than that says that all went as listed, and two more that the pass failed.
    """

    def __init__(self, agree: Callable[[int], int], *, alone: bool = False) -> None:
        """`alone`: there is no other rank."""
        self._agree = agree
        self._alone = alone
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
        """Add a member with the entries `names`, alike on all ranks; returns the first number.

        Those `staying`, counted from 0, are units that may be there without being gathered.
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
        """Remove a member; what is known of passes is forgotten."""
        self._members = [each for each in self._members if each.first != first]
        self._by_use = [each for each in self._by_use if each.first != first]
        self._known.clear()
        self._choices = None

    @property
    def _end(self) -> int:
        return len(self._names)

    def open(self, key: Hashable, *, descending: bool = False, uneven: bool = False) -> None:
        """Begin a pass; `key` tells passes of different kinds apart, alike on all ranks.

        `descending`: units are wanted from the last to the first, as a backward does. `uneven`:
        ranks are in passes of different kinds, and ask for every entry.
        """
        self._descending, self._uneven, self._choices = descending, uneven, None
        self._key, self._order, self._taken = key, None if uneven else self._known.get(key), []
        self._goes_as_listed = True

    def until(self, entry: int) -> Iterator[int]:
        """The entries that all ranks run now, up to `entry`, which this rank needs.

        Raises OrderError where the list of this pass has it no more, and is settled.
        """
        left = self._left()
        before = left[: left.index(entry)] if entry in left else left
        if not self._staying.issuperset(before) or entry not in left:
            self._goes_as_listed = False
        if entry in left:
            yield from self._take([*before, entry])
            return
        if not self._may_ask:
            raise self._out_of_order(entry)
        yield from self._take(left)
        taken = -1
        while taken != entry:
            taken = self._choice[self._agree(self._choice.index(entry))]
            yield from self._take([taken])

    def rest(self, *, expected: Sequence[int] = (), failed: bool = False) -> Iterator[int]:
        """The entries that are left to run for the other ranks' sake; the pass ends.

        `expected` are the entries that a later pass of this kind may want although none did now, in
        their order. `failed`: this rank's pass did not come to its end.
        """
        left, wish = self._left(), -1
        if not self._staying.issuperset(left):
            self._goes_as_listed = False
        yield from self._take(left)
        while self._may_ask:
            wish = self._agree(self._end + (2 if failed else self._goes_as_listed))
            if wish >= self._end:
                break
            self._goes_as_listed = False
            yield from self._take([self._choice[wish]])
        self._remember(wish, expected)
        self._order, self._taken = None, []

    def _remember(self, agreed: int, expected: Sequence[int]) -> None:
        """Learn from a pass at whose end the ranks have `agreed` on this, or on nothing (-1)."""
        if self._order is None:
            if agreed < self._end + 2:
                self._known[self._key] = _KnownOrder(self._completed(expected))
        elif agreed >= 0:
            as_listed = agreed == self._end + 1 and self._is_of_one
            self._order.kept = self._order.kept + 1 if as_listed else 0
            self._known[self._key] = self._with_new(self._order)

    @property
    def _is_of_one(self) -> bool:
        """Whether the units of this pass are of one member.

        What a pass needs of other members is not known beforehand: such passes are never settled.
        """
        owners = {self._owners[entry] for entry in self._taken}
        return sum(not owner.exchanges for owner in owners) <= 1

    def _with_new(self, order: _KnownOrder) -> _KnownOrder:
        """`order` with the entries of this pass that it lacks.

        Each comes before the first one that ranks would run later.
        """
        lacking = [entry for entry in dict.fromkeys(self._taken) if entry not in order.last]
        if not lacking:
            return order
        entries, place = list(order.entries), {entry: n for n, entry in enumerate(self._choice)}
        for entry in lacking:
            later = (n for n, each in enumerate(entries) if place[each] > place[entry])
            entries.insert(next(later, len(entries)), entry)
        return _KnownOrder(entries)

    def _left(self) -> list[int]:
        """What the list of this pass still has."""
        return [] if self._order is None else self._order.entries[len(self._taken) :]

    def _take(self, entries: Iterable[int]) -> Iterator[int]:
        for entry in entries:
            self._taken.append(entry)
            owner = self._owners[entry]
            if not self._descending and not self._uneven and owner is not self._by_use[-1]:
                self._by_use.remove(owner)
                self._by_use.append(owner)
            yield entry

    @property
    def _choice(self) -> list[int]:
        """All entries, those first that are run first where ranks want different ones."""
        if self._choices is None:
            order = self._members if self._uneven else self._by_use
            units = [n for each in order if not each.exchanges for n in each.numbers]
            exchanges = [n for each in order if each.exchanges for n in each.numbers]
            step = -1 if self._descending else 1
            self._choices = units[::step] + exchanges[::step]
        return self._choices

    @property
    def _may_ask(self) -> bool:
        """Whether ranks ask each other when the list has ended."""
        return self._order is None or self._alone or self._order.kept < SETTLED

    def serve(self) -> Iterator[int]:
        """The entries that other ranks want, in uneven passes, until none wants any."""
        self.open(None, uneven=True)
        while (wish := self._agree(self._end)) < self._end:
            yield self._choice[wish]

    def over(self) -> int | None:
        """The entry before the present one, if it is known not to come again in this pass.

        All ranks learn of it at the same entry.
        """
        if len(self._taken) < 2:
            return None
        *before, entry, now = self._taken
        if self._order is None:
            return None if entry == now or entry in before else entry
        return entry if self._order.last.get(entry) == len(before) else None

    def next(self) -> int | None:
        """The entry that comes next, where that is known."""
        left = self._left()
        return left[0] if left else None

    def _completed(self, expected: Sequence[int]) -> list[int]:
        """What was run, with the units that nobody wanted.

        Each comes after the one before it in the order of a forward.
        """
        if not self._descending:
            return with_unseen(self._taken, expected)
        return with_unseen(self._taken[::-1], expected[::-1])[::-1]

    def _out_of_order(self, entry: int) -> OrderError:
        before = self._names[self._taken[-1]] if self._taken else "the start"
        what = "The statistics of" if self._owners[entry].exchanges else "Unit"
        return OrderError(
            f"{what} {self._names[entry]} is needed after {before}, where earlier passes of this "
            "kind did not need it. Sharded parameters are gathered by all ranks together, in one "
            "order. Where ranks run different numbers of forwards (generation, evaluation on one "
            "rank), write: with engine.uneven(). Where the order really changes, name larger units "
            "with --units, or replicate the parameters with --zero 2."
        )


def with_unseen(seen: Sequence[int], full: Sequence[int]) -> list[int]:
    """`seen` with the units of `full` that it lacks, each after its predecessor in `full`."""
    merged = list(seen)
    before: int | None = None
    for unit in full:
        if unit not in merged:
            merged.insert(0 if before is None else merged.index(before) + 1, unit)
        before = unit
    return merged
