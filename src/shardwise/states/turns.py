"""In which order ranks gather units, so that all of them always gather the same one.

A gather is collective, but ranks may need different units: one skips a branch, another takes it.
So gathers follow a list that all ranks share. A rank that needs a unit further down the list
takes part in those before it on the way ("catching up"), and in what is left when its pass ends:

    list          embed   a   b   c   head
    rank 0        embed   a       c   head       b is gathered on the way to c, and let go
    rank 1        embed   a   b       head       so is c, on the way to head

The list of a pass is agreed upon the first time: ranks tell which unit they want next, the first
of these by number (in a backward the last) is gathered by all, and so on until all ranks have ended
the pass. Units that no rank wanted then are put beside their neighbours, since a later pass may
take another branch. A pass that failed on all ranks teaches nothing.

A pass may need more than the list of its kind has: units in another order, one of them twice, a
backward over two forwards that took different branches. So when the list has ended ranks ask each
other whether any of them wants something still, and go on as in a first pass. Once a kind of pass
has gone as its list says for `SETTLED` times on all ranks, it is *settled*: later ones follow the
list and ask nothing. For a rank that is alone no order is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from shardwise.errors import OrderError

SETTLED = 16
"""Passes of a kind, one after the other, that go as their list says until ranks stop to ask."""


class _Order:
    """The list of a kind of pass; `last` has by unit its last place. `kept` counts the passes in a
    row that went as it says."""

    def __init__(self, units: list[int]) -> None:
        self.units = units
        self.last = {unit: place for place, unit in enumerate(units)}
        self.kept = 0


class Turns:
    """The turns of one pass after the other; `agree` is collective and small.

    `agree(wanted)` tells this rank's wish and returns the smallest of all ranks' wishes. The
    number of units is the wish for nothing more, one more than that says that all went as listed,
    and two more that the pass failed.
    """

    def __init__(
        self,
        names: Sequence[str],
        agree: Callable[[int], int],
        *,
        staying: Collection[int] = (),
        alone: bool = False,
    ) -> None:
        """`names` are by unit; those `staying` may be there without a turn. `alone`: there is no
        other rank."""
        self._names = names
        self._agree = agree
        self._staying = frozenset(staying)
        self._alone = alone
        self._end = len(names)
        self._known: dict[Hashable, _Order] = {}
        self._key: Hashable = None
        self._order: _Order | None = None
        self._taken: list[int] = []
        self._descending = False
        self._goes_as_listed = True

    def open(self, key: Hashable, *, descending: bool = False) -> None:
        """A pass begins; `key` tells passes of different kinds apart, alike on all ranks.

        `descending`: units are wanted from the last to the first, as a backward does.
        """
        self._descending = descending
        self._key, self._order, self._taken = key, self._known.get(key), []
        self._goes_as_listed = True

    def until(self, unit: int) -> Iterator[int]:
        """The units that all ranks gather now, up to `unit`, which this rank needs.

        Raises OrderError where the list of this pass has it no more, and is settled.
        """
        left = self._left()
        before = left[: left.index(unit)] if unit in left else left
        if not self._staying.issuperset(before) or unit not in left:
            self._goes_as_listed = False
        if unit in left:
            yield from self._take([*before, unit])
            return
        if not self._may_ask:
            raise self._out_of_order(unit)
        yield from self._take(left)
        turn = -1
        while turn != unit:
            turn = self._turned(self._agree(self._turned(unit)))
            yield from self._take([turn])

    def rest(self, *, expected: Sequence[int] = (), failed: bool = False) -> Iterator[int]:
        """The units that are left to gather for the other ranks' sake; the pass ends.

        `expected` are the units that a later pass of this kind may want although none did now, in
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
            yield from self._take([self._turned(wish)])
        self._remember(wish, expected)
        self._order, self._taken = None, []

    def _remember(self, told: int, expected: Sequence[int]) -> None:
        """Learn from a pass at whose end the ranks have `told` each other this, or nothing."""
        if self._order is None:
            if told < self._end + 2:
                self._known[self._key] = _Order(self._completed(expected))
        elif told >= 0:
            self._order.kept = self._order.kept + 1 if told == self._end + 1 else 0

    def _left(self) -> list[int]:
        """What the list of this pass still has."""
        return [] if self._order is None else self._order.units[len(self._taken) :]

    def _take(self, turns: Iterable[int]) -> Iterator[int]:
        for turn in turns:
            self._taken.append(turn)
            yield turn

    @property
    def _may_ask(self) -> bool:
        """Whether ranks ask each other when the list has ended."""
        return self._order is None or self._alone or self._order.kept < SETTLED

    def serve(self) -> Iterator[int]:
        """Gather whatever other ranks want, in passes that ascend, until none wants anything."""
        while (turn := self._agree(self._end)) < self._end:
            yield turn

    def over(self) -> int | None:
        """The unit before the one whose turn it is, if it has no further turn in this pass, or
        none is known of. All ranks learn of it at the same turn."""
        if len(self._taken) < 2:
            return None
        *before, unit, now = self._taken
        if self._order is None:
            return None if unit == now or unit in before else unit
        return unit if self._order.last.get(unit) == len(before) else None

    def next(self) -> int | None:
        """The unit whose turn comes next, where that is known."""
        left = self._left()
        return left[0] if left else None

    def _completed(self, expected: Sequence[int]) -> list[int]:
        """What was taken with the units that nobody wanted: each after the one before it, in the
        order of a forward."""
        if not self._descending:
            return with_unseen(self._taken, expected)
        return with_unseen(self._taken[::-1], expected[::-1])[::-1]

    def _turned(self, unit: int) -> int:
        """The wish for `unit`, or the unit that a wish is for."""
        return self._end - 1 - unit if self._descending else unit

    def _out_of_order(self, unit: int) -> OrderError:
        before = self._names[self._taken[-1]] if self._taken else "the start"
        return OrderError(
            f"Unit {self._names[unit]} is needed after {before}, where earlier passes of this kind "
            "did not need it. Sharded parameters are gathered by all ranks together, in one order. "
            "Where ranks run different numbers of forwards (generation, evaluation on one rank), "
            "write: with engine.uneven(). Where the order really changes, name larger units with "
            "--units, or replicate the parameters with --zero 2."
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
