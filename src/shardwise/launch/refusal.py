"""What a user asked for and cannot have: a sentence says it all, a traceback of ours says nothing.

the user's line ─▶ our frames only ─▶ an error of ours              a refusal
                ─▶ the same, after an error of the user's own       no refusal: both are shown
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from shardwise.errors import CollectiveError, ShardwiseError
from shardwise.printable import from_here

OURS = Path(__file__).parents[1]


def sentence(error: BaseException) -> str:
    """The error, with the user's lines that led to it; "" where the traceback is needed."""
    if not isinstance(error, ShardwiseError) or isinstance(error, CollectiveError):
        return ""
    files = _files(error.__traceback__)
    users = [number for number, file in enumerate(files) if _is_users(file)]
    if not users or not any(OURS in file.parents for file in files[users[-1] :]):
        return ""
    if any(any(map(_is_users, _files(cause.__traceback__))) for cause in _causes(error)):
        return ""
    told = " ".join([str(error), *getattr(error, "__notes__", ())])
    *before, last = _users_frames(error.__traceback__)
    way = "".join(f"{_place(frame)} > " for frame in before)
    return f"{told} [{way}{_line(last)}]"


def users_line(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither ours nor torch's nor Python's; "" if none
    is."""
    frames = _users_frames(trace)
    return _line(frames[-1]) if frames else ""


def _users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    frames = zip(_files(trace), traceback.extract_tb(trace), strict=True)
    return [frame for file, frame in frames if _is_users(file)]


def _line(frame: traceback.FrameSummary) -> str:
    return _place(frame) + (f": {frame.line}" if frame.line else "")


def _place(frame: traceback.FrameSummary) -> str:
    return f"{from_here(frame.filename)}:{frame.lineno}"


def _files(trace: TracebackType | None) -> list[Path]:
    """The files of the modules that a traceback goes through, outermost first: what a dataclass
    generates is in none of its own."""
    return [
        Path(frame.f_globals.get("__file__") or frame.f_code.co_filename)
        for frame, _ in traceback.walk_tb(trace)
    ]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to this one, as a traceback shows them."""
    seen = [error]
    while True:
        found = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if found is None or found in seen:
            return
        yield found
        seen.append(found)
        error = found


def _is_users(file: Path) -> bool:
    """Whether a file is neither ours nor torch's nor Python's own: a package that is installed may
    well be the user's project."""
    if str(file).startswith("<frozen ") or not {OURS, _torch()}.isdisjoint(file.parents):
        return False
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    return bool(installed) or _python() not in file.parents


@cache
def _torch() -> Path | None:
    found = find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


@cache
def _python() -> Path:
    return Path(sysconfig.get_path("stdlib"))
