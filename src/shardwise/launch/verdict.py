"""Which rank a failed run is to be blamed on, and what to show of it. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.launch.report import Report

CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
LINES_WITHOUT_TRACE = 20

_TRACE = re.compile(
    r"^[^|\n]*?((?:  \+ Exception Group )?Traceback \(most recent call last\):"
    r"|Fatal Python error:)",
    re.MULTILINE,
)
"""The start of a traceback, maybe behind an unfinished progress bar; not inside a group's own."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank ended: `code` as subprocess has it (negative for a signal), `time` in seconds
    since the epoch, `stopped` when the launcher had asked it to end by then."""

    rank: int
    code: int
    time: float
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rank to blame and the exit code of the run. `waiting` is a rank that could not go on
    because of `rank`, None where that failed itself. `late`: `rank` did not come, nor say anything
    until it was ended; else it had ended in peace too early."""

    rank: int
    exit_code: int
    waiting: int | None = None
    late: bool = False


def judge(ends: Sequence[End], reports: Mapping[int, Report]) -> Verdict | None:
    """The verdict over a run whose ranks have all ended; None when all ended well.

    The cause is the first failure that is not merely about another rank. Where there is none
    but a rank ended by itself with code 0, that rank left too early; where none did but those that
    waited name one that said nothing, it is that one.
    """
    failures = [end for end in ends if end.code != 0 and _is_own(end, reports)]
    if not failures:
        return None
    first = min(failures, key=lambda end: _moment(end, reports))
    if _is_secondary(first, reports):
        left = [end for end in ends if end.code == 0 and not end.stopped]
        if left:
            early = min(left, key=lambda end: end.time)
            return Verdict(rank=early.rank, exit_code=1, waiting=first.rank)
        late = _late(ends, failures, reports)
        if late is not None:
            return late
    return Verdict(rank=first.rank, exit_code=_exit_code(first))


def _late(
    ends: Sequence[End], failures: Sequence[End], reports: Mapping[int, Report]
) -> Verdict | None:
    """That one is to blame which the first of those that waited names, and which had to be ended
    before it said anything; where none is named, the only one that said nothing."""
    silent = {end.rank for end in ends} - {end.rank for end in failures}
    waited = sorted(failures, key=lambda end: _moment(end, reports))
    for end in waited:
        for rank in reports[end.rank].at_fault if end.rank in reports else ():
            if rank in silent:
                return Verdict(rank=rank, exit_code=1, waiting=end.rank, late=True)
    if len(silent) == 1:
        return Verdict(rank=silent.pop(), exit_code=1, waiting=waited[0].rank, late=True)
    return None


def is_explained(ends: Sequence[End], reports: Mapping[int, Report]) -> bool:
    """Whether the cause of a failure is among `ends`: not all of them lost another rank."""
    return any(not _is_secondary(end, reports) for end in ends)


def is_consequence(judged: Verdict, reports: Mapping[int, Report]) -> bool:
    """Whether all that failed had only lost others, so that the cause lies elsewhere."""
    found = reports.get(judged.rank if judged.waiting is None else judged.waiting)
    return found is not None and found.secondary


def refused(ends: Sequence[End], reports: Mapping[int, Report]) -> str:
    """The sentence that all ranks have died of; "" where any of them has another end, but for those
    that were ended before they could say anything."""
    own = [end.rank for end in ends if not end.stopped or end.rank in reports]
    found = {reports[rank].refusal if rank in reports else "" for rank in own}
    return found.pop() if len(found) == 1 else ""


def _is_own(end: End, reports: Mapping[int, Report]) -> bool:
    """Whether a rank failed by itself, rather than because the launcher ended it."""
    return not end.stopped or end.rank in reports


def _is_secondary(end: End, reports: Mapping[int, Report]) -> bool:
    return end.rank in reports and reports[end.rank].secondary


def _moment(end: End, reports: Mapping[int, Report]) -> tuple[bool, float]:
    """The order of blame: causes before consequences, then by time."""
    time = reports[end.rank].time if end.rank in reports else end.time
    return _is_secondary(end, reports), time


def _exit_code(end: End) -> int:
    if end.stopped:
        return 1
    return 128 - end.code if end.code < 0 else end.code


def last_words(tail: str) -> str:
    """Of the end of a rank's output its last traceback with those it is chained to; else lines."""
    text = tail.rstrip()
    starts = [match.start(1) for match in _TRACE.finditer(text)]
    if not starts:
        return "\n".join(text.splitlines()[-LINES_WITHOUT_TRACE:])
    start = starts.pop()
    while starts and any(words in text[starts[-1] : start] for words in CHAINED):
        start = starts.pop()
    return text[start:]
