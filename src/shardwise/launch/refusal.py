"""What a user asked for and cannot have: a sentence says it all, a traceback of ours says nothing.

the user's line ─▶ our frames only ─▶ an error of ours     a refusal
                ─▶ ours ─▶ the user's ─▶ any error         no refusal
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

from shardwise.errors import CollectiveError, ShardwiseError

OURS = Path(__file__).parents[1]


def sentence(error: BaseException) -> str:
    """The error, with the user's line that led to it; "" where the traceback is needed."""
    if not isinstance(error, ShardwiseError) or isinstance(error, CollectiveError):
        return ""
    files = _files(error.__traceback__)
    entry = next((number for number, file in enumerate(files) if OURS in file.parents), None)
    if entry is None or any(map(_is_users, files[entry:])):
        return ""
    if any(map(_went_through_users, _causes(error))):
        return ""
    line = users_line(error.__traceback__)
    return f"{error} [{line}]" if line else str(error)


def users_line(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither ours nor of an installed package."""
    lines = zip(_files(trace), traceback.extract_tb(trace), strict=True)
    for file, frame in reversed(list(lines)):
        if _is_users(file):
            name = frame.filename.removeprefix(f"{Path.cwd()}{os.sep}")
            return f"{name}:{frame.lineno}" + (f": {frame.line}" if frame.line else "")
    return ""


def _files(trace: TracebackType | None) -> list[Path]:
    """The files of the modules that a traceback goes through, outermost first: what a dataclass
    generates is in none of its own."""
    return [
        Path(frame.f_globals.get("__file__") or frame.f_code.co_filename)
        for frame, _ in traceback.walk_tb(trace)
    ]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to this one, as a traceback shows them."""
    found = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if found is not None:
        yield found
        yield from _causes(found)


def _went_through_users(cause: BaseException) -> bool:
    """Whether code of ours called the user's; an error that the user caught begins with theirs."""
    files = _files(cause.__traceback__)
    return bool(files) and not _is_users(files[0]) and any(map(_is_users, files))


def _is_users(file: Path) -> bool:
    return not _libraries() & set(file.parents)


@cache
def _libraries() -> set[Path]:
    return {OURS, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))}
