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
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from shardwise.errors import OrderError


class Turns:
    """The turns of one pass after the other; `agree` is collective and small.

    `agree(wanted)` tells this rank's wish and returns the smallest of all ranks' wishes. The
    number of units is the wish for nothing more, and one more than that says that the pass failed.
    """

    def __init__(self, names: Sequence[str], agree: Callable[[int], int]) -> None:
        """`names` are by unit."""
        self._names = names
        self._agree = agree
        self._end = len(names)
        self._known: dict[Hashable, list[int]] = {}
        self._key: Hashable = None
        self._list: list[int] | None = None
        self._last: dict[int, int] = {}
        self._taken: list[int] = []
        self._descending = False

    def open(self, key: Hashable, *, descending: bool = False) -> None:
        """A pass begins; `key` tells passes of different kinds apart, alike on all ranks.

        `descending`: units are wanted from the last to the first, as a backward does.
        """
        self._descending = descending
        self._key, self._list, self._taken = key, self._known.get(key), []
        self._last = {unit: place for place, unit in enumerate(self._list or ())}

    def until(self, unit: int) -> Iterator[int]:
        """The units that all ranks gather now, up to `unit`, which this rank needs.

        Raises OrderError where the list of this pass has it no more.
        """
        if self._list is None:
            turn = -1
            while turn != unit:
                turn = self._turned(self._agree(self._turned(unit)))
                self._taken.append(turn)
                yield turn
            return
        first = len(self._taken)
        if unit not in self._list[first:]:
            raise self._out_of_order(unit)
        for turn in self._list[first : self._list.index(unit, first) + 1]:
            self._taken.append(turn)
            yield turn

    def rest(self, *, expected: Sequence[int] = (), failed: bool = False) -> Iterator[int]:
        """The units that are left to gather for the other ranks' sake; the pass ends.

        `expected` are the units that a later pass of this kind may want although none did now, in
        their order. `failed`: this rank's pass did not come to its end.
        """
        if self._list is None:
            while (wish := self._agree(self._end + failed)) < self._end:
                self._taken.append(self._turned(wish))
                yield self._taken[-1]
            if wish == self._end:
                self._known[self._key] = self._completed(expected)
        else:
            for turn in self._list[len(self._taken) :]:
                self._taken.append(turn)
                yield turn
        self._list, self._last, self._taken = None, {}, []

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
        if self._list is None:
            return None if unit == now or unit in before else unit
        return unit if self._last.get(unit) == len(before) else None

    def next(self) -> int | None:
        """The unit whose turn comes next, where that is known."""
        if self._list is None or len(self._taken) >= len(self._list):
            return None
        return self._list[len(self._taken)]

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
