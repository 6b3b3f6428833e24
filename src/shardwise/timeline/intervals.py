"""Stretches of time: sorted, disjoint lists of (begin, end). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = Sequence[Interval]


def union(several: Iterable[Interval]) -> list[Interval]:
    """What any of them covers."""
    found: list[Interval] = []
    for begin, end in sorted(several):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif begin < end:
            found.append((begin, end))
    return found


def minus(whole: Intervals, taken: Intervals) -> list[Interval]:
    """What `whole` covers and `taken` does not."""
    found = []
    for begin, end in whole:
        for low, high in clipped(taken, begin, end):
            if begin < low:
                found.append((begin, low))
            begin = high
        if begin < end:
            found.append((begin, end))
    return found


def clipped(whole: Intervals, begin: float, end: float) -> list[Interval]:
    """What lies between `begin` and `end`."""
    first = max(0, bisect_right(whole, (begin, float("inf"))) - 1)
    found = []
    for number in range(first, len(whole)):
        low, high = whole[number]
        if low >= end:
            break
        if high > begin:
            found.append((max(low, begin), min(high, end)))
    return found


def length(whole: Intervals) -> float:
    """How much it covers."""
    return sum(end - begin for begin, end in whole)
