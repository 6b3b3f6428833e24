"""Finds the lines that asked for something: the innermost of the package, or of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby, islice
from types import CodeType, FrameType

_PACKAGE, _TESTS, _OWN = "/shardwise/", "/tests/", "/tests/phantom/"

LINES = 4

_known: dict[CodeType, str] = {}
"""By code object, the part of its file's name to show; "" for code of torch or Python."""


class Lines(tuple[tuple[str, int], ...]):
    """Files and lines, the innermost first; as text `tiers/nvme.py:12 < engine/step.py:34`."""

    __slots__ = ()

    def __str__(self) -> str:
        return " < ".join(f"{name}:{line}" for name, line in self) or "torch"


def where() -> Lines:
    """Return the lines that this thread is executing."""
    return Lines(islice(_lines(sys._getframe(1)), LINES))


def asking_files() -> set[str]:
    """Return the files that this thread is executing, at most LINES from the innermost on.

    Calls inside one file count once: splitting a function in two must not hide the caller.
    """
    names = (name for name, _ in _lines(sys._getframe(1)))
    return {name for name, _ in islice(groupby(names), LINES)}


def _lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        code = frame.f_code
        name = _known.get(code)
        if name is None:
            name = _known[code] = _shown(code.co_filename)
        if name:
            yield name, frame.f_lineno
        frame = frame.f_back


def _shown(path: str) -> str:
    if _OWN in path and not path.rpartition("/")[2].startswith(("case", "test_")):
        return ""
    for part in (_PACKAGE, _TESTS):
        if part in path and "/site-packages/" not in path:
            return path.rpartition(part)[2]
    return ""
