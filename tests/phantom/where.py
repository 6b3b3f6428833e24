"""Which lines asked for something: the innermost of the package, or of the tests."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_PACKAGE, _TESTS, _OWN = "/shardwise/", "/tests/", "/tests/phantom/"

LINES = 4

_known: dict[CodeType, str] = {}
"""By code, the part of its file's name that is shown; "" where it is torch's or Python's."""


def where() -> str:
    """As `states/held.py:12 < engine/engine.py:34`, the innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < LINES:
        name = _name(frame.f_code)
        if name:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "torch"


def _name(code: CodeType) -> str:
    known = _known.get(code)
    if known is None:
        known = _known[code] = _shown(code.co_filename)
    return known


def _shown(path: str) -> str:
    if _OWN in path and not path.rpartition("/")[2].startswith(("case", "test_")):
        return ""
    for part in (_PACKAGE, _TESTS):
        if part in path and "/site-packages/" not in path:
            return path.rpartition(part)[2]
    return ""
