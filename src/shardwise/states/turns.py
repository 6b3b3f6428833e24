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

A pass in which all that was expected was wanted, once for each forward that it belongs to, is
*settled*: later ones of its kind follow the list and say nothing. Others may need more than their
list has (a backward over two forwards that took different branches), so after the list ranks ask
each other whether any of them wants something still, and go on as in a first pass. For a rank that
is alone no order is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from shardwise.errors import OrderError


class _Order:
    """The list of a kind of pass; `last` has by unit its last place."""

    def __init__(self, units: list[int], is_settled: bool) -> None:
        self.units = units
        self.is_settled = is_settled
        self.last = {unit: place for place, unit in enumerate(units)}


class Turns:
    """The turns of one pass after the other; `agree` is collective and small.

    `agree(wanted)` tells this rank's wish and returns the smallest of all ranks' wishes. The
    number of units is the wish for nothing more, and one more than that says that the pass failed.
    """

    def __init__(
        self, names: Sequence[str], agree: Callable[[int], int], *, alone: bool = False
    ) -> None:
        """`names` are by unit; `alone`: there is no other rank."""
        self._names = names
        self._agree = agree
        self._alone = alone
        self._end = len(names)
        self._known: dict[Hashable, _Order] = {}
        self._key: Hashable = None
        self._order: _Order | None = None
        self._taken: list[int] = []
        self._descending = False

    def open(self, key: Hashable, *, descending: bool = False) -> None:
        """A pass begins; `key` tells passes of different kinds apart, alike on all ranks.

        `descending`: units are wanted from the last to the first, as a backward does.
        """
        self._descending = descending
        self._key, self._order, self._taken = key, self._known.get(key), []

    def until(self, unit: int) -> Iterator[int]:
        """The units that all ranks gather now, up to `unit`, which this rank needs.

        Raises OrderError where the list of this pass has it no more, and is settled.
        """
        left = self._left()
        if unit in left:
            yield from self._take(left[: left.index(unit) + 1])
            return
        if not self._may_ask:
            raise self._out_of_order(unit)
        yield from self._take(left)
        turn = -1
        while turn != unit:
            turn = self._turned(self._agree(self._turned(unit)))
            yield from self._take([turn])

    def rest(
        self,
        *,
        expected: Sequence[int] = (),
        staying: Collection[int] = (),
        rounds: int = 1,
        failed: bool = False,
    ) -> Iterator[int]:
        """The units that are left to gather for the other ranks' sake; the pass ends.

        `expected` are the units that a later pass of this kind may want although none did now, in
        their order, as often as there are `rounds`; those that are `staying` may be there without a
        turn. `failed`: this rank's pass did not come to its end.
        """
        yield from self._take(self._left())
        wish = self._end
        if self._may_ask:
            while (wish := self._agree(self._end + failed)) < self._end:
                yield from self._take([self._turned(wish)])
        if self._order is None and wish == self._end:
            self._known[self._key] = self._learned(expected, staying, rounds)
        self._order, self._taken = None, []

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
        return self._order is None or self._alone or not self._order.is_settled

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

    def _learned(self, expected: Sequence[int], staying: Collection[int], rounds: int) -> _Order:
        """The list of later passes of this kind: what was taken with the units that nobody wanted,
        each after the one before it, in the order of a forward."""
        came = set(self._taken)
        usual = [unit for unit in expected if unit in came or unit not in staying]
        is_settled = in_rounds(self._taken, usual, rounds)
        if not self._descending:
            return _Order(with_unseen(self._taken, expected), is_settled)
        return _Order(with_unseen(self._taken[::-1], expected[::-1])[::-1], is_settled)

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


def in_rounds(seen: Sequence[int], expected: Sequence[int], rounds: int) -> bool:
    """Whether `seen` is all of `expected`, in any order, `rounds` times over in that same order."""
    first = list(seen[: len(expected)])
    return sorted(first) == sorted(expected) and first * rounds == list(seen)
