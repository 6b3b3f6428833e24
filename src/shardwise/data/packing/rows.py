"""Assigns documents to rows of a fixed length.

    documents, in the epoch's order      5 3 4 2 6
    rows of 8 tokens                     5 3 | 4 2 . . | 6 . .      in order: 3 rows
    best-fit, longest first              6 2 | 5 3 | 4 . . . .      leaves one row almost empty

The rows depend only on the lengths and their order, so they are the same at every world size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence


class RowPacker:
    """Packs items, added one by one, into at most `count` rows of `row` tokens.

    A new item is added to the fullest row that has enough space (best fit). If there is no such
    row, all items are assigned again from the longest to the shortest, which needs at most about
    11/9 of the optimal number of rows (Johnson 1974).
    """

    def __init__(self, row: int, count: int) -> None:
        self._row, self._count = row, count
        self._items: list[tuple[int, int]] = []  # (length, item), in order of arrival
        self._used = 0
        self._rows: list[list[int]] = []
        # (free tokens, row number), sorted. The first entry that is large enough is the best fit.
        self._free: list[tuple[int, int]] = []

    def add(self, item: int, length: int) -> bool:
        """Add an item. If it does not fit into the rows, change nothing and return False."""
        if self._used + length > self._row * self._count:
            return False
        if not self._place(item, length):
            before = self._rows, self._free
            self._rows, self._free = [], []
            everything = [*self._items, (length, item)]
            # `sort` is stable, so documents of the same length keep their order.
            everything.sort(key=lambda each: -each[0])
            if not all(self._place(each, tokens) for tokens, each in everything):
                self._rows, self._free = before
                return False
        self._items.append((length, item))
        self._used += length
        return True

    def rows(self) -> list[list[int]]:
        """Return the items in each row, in the order in which they were added."""
        order = {item: number for number, (_, item) in enumerate(self._items)}
        rows = [sorted(row, key=order.__getitem__) for row in self._rows]
        return sorted(rows, key=lambda row: order[row[0]])

    def _place(self, item: int, length: int) -> bool:
        at = bisect.bisect_left(self._free, (length, 0))
        if at < len(self._free):
            free, number = self._free.pop(at)
        elif len(self._rows) < self._count and length <= self._row:
            free, number = self._row, len(self._rows)
            self._rows.append([])
        else:
            return False
        self._rows[number].append(item)
        bisect.insort(self._free, (free - length, number))
        return True


def close_steps(
    indices: Iterable[int], lengths: Sequence[int], row: int, count: int
) -> Iterator[list[int]]:
    """Yield the steps: consecutive `indices` that fit into `count` rows of `row` tokens."""
    step: list[int] = []
    packer = RowPacker(row, count)
    for index in indices:
        if not packer.add(len(step), lengths[index]):
            yield step
            step, packer = [], RowPacker(row, count)
            packer.add(0, lengths[index])
        step.append(index)
    if step:
        yield step


def pack_rows(lengths: Sequence[int], row: int, count: int) -> list[list[int]]:
    """Return the items in each row. `lengths` are those of a step from `close_steps`."""
    packer = RowPacker(row, count)
    for item, length in enumerate(lengths):
        fits = packer.add(item, length)
        assert fits, "close_steps has packed the same lengths in the same order"
    return packer.rows()
