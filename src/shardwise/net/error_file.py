"""Writes the error that a rank died of to a file, in which its launcher reads it.

When several ranks fail, most of them only report that another one is gone. Each rank that dies of
an exception writes an error file with the time, so that the launcher can show the first cause.

What a user asked for and cannot have is a *refusal*: one sentence says it all, and a traceback of
ours says nothing. The launcher shows one once that all ranks share; without a launcher each rank
shows its own.

the user's line ─▶ our frames only ─▶ an error of ours              a refusal
                ─▶ the same, after an error of the user's own       no refusal: both are shown
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from shardwise.errors import CollectiveError, LaunchError, ShardwiseError
from shardwise.messages.printable import from_here
from shardwise.net.environment import OWN_NAMES, RANK_VARIABLE, REPORTS_VARIABLE
from shardwise.net.launchers import detection as launcher_detection


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Why a rank died. `secondary` when the cause is likely on another rank, one of `at_fault`
    where any are known.

    `message` is the last line, `text` the whole traceback, `where` the user's own line that it
    went through last ("" if none), `time` in seconds since the epoch.
    """

    rank: int
    time: float
    secondary: bool
    message: str
    text: str
    where: str = ""
    refusal: str = ""
    at_fault: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_fault", tuple(self.at_fault))  # JSON knows lists


def watch_exceptions() -> None:
    """Write an error file for an uncaught exception, and show a refusal as a sentence."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def watch_before_joining() -> None:
    """Watch exceptions of a process that may be a rank, from its import of shardwise on.

    Only the first process of a rank reports for it: an error of a helper that the script starts is
    not the rank's.
    """
    if os.environ.setdefault(_REPORTER, str(os.getpid())) == str(os.getpid()):
        watch_exceptions()


_REPORTER = "SHARDWISE_LAUNCH_REPORTER"


class _Hook:
    """Shows an uncaught exception; `before` does where no launcher of ours waits for a report.

    Written past sys.stderr, which torch.distributed wraps in a prefix of its own by then.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before
        self._process = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        refused = refusal_sentence(error)
        shown = f"shardwise: {_speaker()}{refused}\n" if refused else ""
        # An error of a forked child is not the rank's, and nobody else shows it.
        if REPORTS_VARIABLE not in os.environ or os.getpid() != self._process:
            if not shown or self._before is not sys.__excepthook__:  # one that others have set
                self._before(kind, error, trace)
            if shown:
                _show(shown)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        alone = os.environ.get(OWN_NAMES["size"], "1") == "1"
        is_shown_for_us = bool(refused) and not alone and not _blames(error)
        if not isinstance(error, KeyboardInterrupt):
            folder = Path(os.environ[REPORTS_VARIABLE])
            try:
                write(folder, error, text, refusal=refused if is_shown_for_us else "")
            except OSError:  # a full disk: then this rank says it itself
                is_shown_for_us = False
        if isinstance(error, KeyboardInterrupt) or _blames(error):
            _show(f"{_message(error)} [{users_line(trace)}]\n")
        elif not is_shown_for_us:
            _show(shown or text)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()


def _speaker() -> str:
    """Name this rank where there are several: the others may not say the same."""
    try:
        identity = launcher_detection.identify()
    except LaunchError:  # that error is the one to be shown
        return ""
    return "" if identity.size == 1 else f"rank {identity.rank} of {identity.size}: "


def write(folder: Path, error: BaseException, text: str, refusal: str = "") -> None:
    """Write the error file of this rank in `folder`, whole or not at all."""
    rank = int(os.environ[RANK_VARIABLE])
    report = ErrorReport(
        rank=rank,
        time=time.time(),
        secondary=_blames(error),
        message=_message(error),
        text=text,
        where=users_line(error.__traceback__),
        refusal=refusal,
        at_fault=error.at_fault if isinstance(error, ShardwiseError) else (),
    )
    aside = folder / f".{rank}.json"
    aside.write_text(json.dumps(asdict(report)))
    aside.rename(folder / f"{rank}.json")


def _blames(error: BaseException) -> bool:
    """Whether the cause is likely on another rank."""
    named = isinstance(error, ShardwiseError) and bool(error.at_fault)
    return named or isinstance(error, CollectiveError)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def read(folder: Path) -> dict[int, ErrorReport]:
    """Read the error files in `folder`, by rank."""
    found = (ErrorReport(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json"))
    return {report.rank: report for report in found}


OURS = Path(__file__).parents[1]
_BEFORE_USERS = {OURS / "adopt.py", OURS / "launch" / "function_rank.py"}
"""Files whose refusals are whole sentences although no line of the user's led to them."""


def refusal_sentence(error: BaseException) -> str:
    """Return the error with the user's lines that led to it; "" where the traceback is needed."""
    if not isinstance(error, ShardwiseError) or isinstance(error, CollectiveError):
        return ""
    files = _files(error.__traceback__)
    users = [number for number, file in enumerate(files) if is_users(file)]
    if not users and not _BEFORE_USERS.isdisjoint(files):
        return _said(error)
    if not users or not any(OURS in file.parents for file in files[users[-1] :]):
        return ""
    if any(any(map(is_users, _files(cause.__traceback__))) for cause in _causes(error)):
        return ""
    *before, last = _users_frames(error.__traceback__)
    way = "".join(f"{_place(frame)} > " for frame in before)
    return f"{_said(error)} [{way}{_line(last)}]"


def _said(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def users_line(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither ours nor torch's nor Python's; "" if none
    is."""
    frames = _users_frames(trace)
    return _line(frames[-1]) if frames else ""


def _users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    frames = zip(_files(trace), traceback.extract_tb(trace), strict=True)
    return [frame for file, frame in frames if is_users(file)]


def _line(frame: traceback.FrameSummary) -> str:
    return _place(frame) + (f": {frame.line}" if frame.line else "")


def _place(frame: traceback.FrameSummary) -> str:
    return f"{from_here(frame.filename)}:{frame.lineno}"


def _files(trace: TracebackType | None) -> list[Path]:
    """The files whose code a traceback goes through, outermost first."""
    return [_file(frame) for frame, _ in traceback.walk_tb(trace)]


def _file(frame: FrameType) -> Path:
    """The file of the code that runs in `frame`; that of its module where a dataclass, say, has
    generated it. A module may have another one: a script takes that of `--adopt`'s module."""
    named = frame.f_code.co_filename
    return Path(frame.f_globals.get("__file__", named) if named.startswith("<") else named)


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


def is_users(file: Path) -> bool:
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
