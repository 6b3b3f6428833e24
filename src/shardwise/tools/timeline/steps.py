"""Divides each rank's steps into kinds of work, from a timeline's events. Does no I/O.

Spans of a rank may overlap. Each moment counts for the first kind in this list that covers it:

    exposed communication > checkpoint > data > update > backward > forward > other
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardwise.timeline.recorder import WAIT, WAIT_BESIDE, Row

EXPOSED = "communication"
OTHER = "other"
KINDS = ("data", "forward", "backward", EXPOSED, "update", "checkpoint", OTHER)
"""The kinds of time in a step. Together they make up the full step."""

_SYNCHRONIZE = "synchronize"
"""Name of a span in a Horovod script during which the rank waits for its communication thread."""

_BLOCKING = {"reduce", "exchange", "publish", "gather", _SYNCHRONIZE}
"""Names of spans that consist of communication only."""

_FIRST = ("update", EXPOSED, "checkpoint", "data", "backward", "forward")
"""The order of precedence. If two kinds cover the same moment, it counts for the earlier one. On a
single GPU, an update may be launched inside the exchange."""

_LAUNCHED = {Row.COMMUNICATION.title, Row.ATTENTION.title}


@dataclass(frozen=True)
class StepTimes:
    """The time of one step on one rank.

    Attributes:
        rank: The rank.
        number: The step number.
        seconds: Total duration in seconds.
        spent: Seconds by kind.
        hidden: Seconds during which a collective was in flight while the rank did other work.
        waited: Seconds during which the rank slept until other ranks arrived.
        nbytes: Number of bytes that the rank passed to collectives.
    """

    rank: int
    number: int
    seconds: float
    spent: Mapping[str, float]
    hidden: float
    waited: float
    nbytes: int

    @property
    def exposed(self) -> float:
        """Seconds during which the rank only communicated."""
        return self.spent[EXPOSED]

    @property
    def busy(self) -> float:
        """Seconds during which the rank did not wait for other ranks."""
        return self.seconds - self.waited


def steps_of(events: Iterable[Mapping[str, Any]]) -> dict[int, list[StepTimes]]:
    """Return each rank's steps in order. If there are several engines, use the first one's."""
    complete: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        # "X" marks complete events. Skip counters, metadata, and other tools' events in merged
        # files.
        if event.get("ph") == "X" and "cat" in event:
            complete[event["pid"]].append(event)
    return {rank: _of_rank(rank, complete[rank]) for rank in sorted(complete)}


def _of_rank(rank: int, events: Sequence[Mapping[str, Any]]) -> list[StepTimes]:
    marks = [event for event in events if event["cat"] == Row.STEPS.title]
    # The steps of several engines (as in a GAN) alternate, so one engine must define the steps.
    first = min((mark["args"]["engine"] for mark in marks), default=0)
    marks = [mark for mark in marks if mark["args"]["engine"] == first]
    kinds = _kinds(events)
    waits = _waits(events)
    launched = [event for event in events if event["cat"] in _LAUNCHED]
    # Communication is hidden if a collective is in flight while the rank is not blocked by
    # communication.
    under_way = minus(union(map(_ends, launched)), kinds[EXPOSED])
    # Compute running totals by end time, so that a step's bytes are the difference of two lookups.
    ended = sorted((_ends(event)[1], event["args"]["bytes"]) for event in launched)
    ends = [end for end, _ in ended]
    sent = [0, *accumulate(nbytes for _, nbytes in ended)]
    steps = []
    for mark in sorted(marks, key=lambda mark: mark["ts"]):
        begin, end = _ends(mark)
        spent = {kind: _seconds(kinds[kind], begin, end) for kind in _FIRST}
        seconds = (end - begin) / 1e6
        # The kinds do not overlap, so the remaining time is the script's own code. Rounding errors
        # could make it negative.
        spent[OTHER] = max(0.0, seconds - sum(spent.values()))
        steps.append(
            StepTimes(
                rank=rank,
                number=mark["args"]["step"],
                seconds=seconds,
                spent={kind: spent[kind] for kind in KINDS},
                hidden=_seconds(under_way, begin, end),
                waited=_seconds(waits, begin, end),
                nbytes=sent[bisect_right(ends, end)] - sent[bisect_right(ends, begin)],
            )
        )
    return steps


def _kinds(events: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the intervals of each kind of work on a rank. None of the intervals overlap."""
    covered: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if (kind := _kind(event)) is not None:
            covered[kind].append(_ends(event))
    intervals: dict[str, list[tuple[float, float]]] = {}
    taken: list[tuple[float, float]] = []
    for kind in _FIRST:
        whole = union(covered[kind])
        intervals[kind] = minus(whole, taken)
        # Later kinds get only the moments that no earlier kind covers.
        taken = union([*taken, *whole])
    return intervals


def _waits(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the intervals in which a rank waited for other ranks.

    The communication thread's waits count only while the rank itself waits for that thread.
    """
    waits = [_ends(event) for event in events if event["cat"] == WAIT]
    beside = union(_ends(event) for event in events if event["cat"] == WAIT_BESIDE)
    for event in events:
        if event["cat"] == Row.COMPUTE.title and event["name"] == _SYNCHRONIZE:
            # Waits of the communication thread cost no time while the rank computes, so count only
            # those inside this span.
            waits += clipped(beside, *_ends(event))
    return union(waits)


def _kind(event: Mapping[str, Any]) -> str | None:
    category, name = event["cat"], event["name"]
    # A collective runs in parallel with other work. It is exposed only while it blocks the rank.
    if category == WAIT or (category == Row.COMPUTE.title and name in _BLOCKING):
        return EXPOSED
    if category == Row.ATTENTION.title:
        return EXPOSED  # attention waits for its exchanges
    if category in (Row.DATA.title, Row.CHECKPOINT.title):
        return str(category)
    if category == Row.COMPUTE.title:
        return next((k for k in ("update", "backward", "forward") if name.startswith(k)), None)
    return None


def _ends(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _seconds(whole: Intervals, begin: float, end: float) -> float:
    return length(clipped(whole, begin, end)) / 1e6


Interval = tuple[float, float]
Intervals = Sequence[Interval]


def union(several: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, as sorted disjoint intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(several):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged


def minus(whole: Intervals, taken: Intervals) -> list[Interval]:
    """Return the part of `whole` that `taken` does not cover."""
    rest = []
    for begin, end in whole:
        for low, high in clipped(taken, begin, end):
            if begin < low:
                rest.append((begin, low))
            begin = high
        if begin < end:
            rest.append((begin, end))
    return rest


def clipped(whole: Intervals, begin: float, end: float) -> list[Interval]:
    """Return the part of `whole` between `begin` and `end`."""
    # Start at the last interval that begins before `begin`, because a timeline has too many
    # intervals to scan all of them.
    first = max(0, bisect_right(whole, (begin, float("inf"))) - 1)
    parts = []
    for number in range(first, len(whole)):
        low, high = whole[number]
        if low >= end:
            break
        if high > begin:
            parts.append((max(low, begin), min(high, end)))
    return parts


def length(whole: Intervals) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in whole)
