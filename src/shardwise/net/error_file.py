"""Writes the exception that terminates a rank to a file for its launcher.

When several ranks fail, most of them only report that another rank has exited. Each rank that is
terminated by an exception writes an error file that includes the time, so that the launcher can
show the original cause.

A *refusal* is an error about incorrect use of the library. Its message is sufficient: the traceback
through our code adds nothing. If all ranks report the same refusal, the launcher shows it once.
Without a launcher, each rank shows its own.

    user code ─▶ our code raises one of our errors             a refusal
    the same, but an error in user code caused our error       not a refusal: both are shown
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.errors import CollectiveError, LaunchError, ShardwiseError
from shardwise.messages.printable import from_here
from shardwise.net.environment import OWN_NAMES, RANK_VARIABLE, REPORTS_VARIABLE
from shardwise.net.launchers import detection as launcher_detection


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The exception that terminated a rank.

    Args:
        rank: The rank that failed.
        time: The time of the error, in seconds since the epoch.
        secondary: True if the cause is probably on another rank.
        message: The last line of the traceback.
        text: The complete traceback.
        where: The innermost line of user code in the traceback, or "".
        refusal: The message to show instead of the traceback, or "" to show the traceback.
        at_fault: The ranks to blame, if known.
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
        object.__setattr__(self, "at_fault", tuple(self.at_fault))  # JSON makes it a list


def watch_exceptions() -> None:
    """Install an exception hook that reports to the launcher, and shows a refusal as one line."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def watch_before_joining() -> None:
    """Install the exception hook when shardwise is imported, if this process may be a rank.

    Only the first process of a rank that imports shardwise installs the hook. If a helper process
    that the script starts fails, this does not mean that the rank has failed.
    """
    if os.environ.setdefault(_REPORTER, str(os.getpid())) == str(os.getpid()):
        watch_exceptions()


_REPORTER = "SHARDWISE_LAUNCH_REPORTER"


class _Hook:
    """Exception hook that reports to our launcher.

    Without a launcher, it calls `before`, the previous hook.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before
        self._process = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        refused = refusal_sentence(error)
        speaker = ""  # names this rank if there are several, because their errors may differ
        if refused:
            with suppress(LaunchError):  # `identify` failed: show only the original error
                identity = launcher_detection.identify()
                if identity.size > 1:
                    speaker = f"rank {identity.rank} of {identity.size}: "
        shown = f"shardwise: {speaker}{refused}\n" if refused else ""
        # A forked child is not the rank, so it shows its error itself instead of writing a file.
        if REPORTS_VARIABLE not in os.environ or os.getpid() != self._process:
            # The sentence replaces Python's own traceback, but not the hook of another library.
            if not shown or self._before is not sys.__excepthook__:
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
            except OSError:  # a full disk: the launcher will not see it, so show it here
                is_shown_for_us = False
        if isinstance(error, KeyboardInterrupt) or _blames(error):
            _show(f"{_message(error)} [{users_line(trace)}]\n")
        elif not is_shown_for_us:
            _show(shown or text)


def _show(text: str) -> None:
    # Not sys.stderr: torch.distributed may have wrapped it to prefix each line.
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()


def write(folder: Path, error: BaseException, text: str, refusal: str = "") -> None:
    """Write this rank's error file to `folder` atomically."""
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
    """Return whether the cause of `error` is probably on another rank."""
    named = isinstance(error, ShardwiseError) and bool(error.at_fault)
    return named or isinstance(error, CollectiveError)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def read(folder: Path) -> dict[int, ErrorReport]:
    """Read the error files in `folder`, and return the reports by rank."""
    found = (ErrorReport(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json"))
    return {report.rank: report for report in found}


OURS = Path(__file__).parents[1]
_BEFORE_USERS = {OURS / "adopt.py", OURS / "launch" / "function_rank.py"}
"""Files whose errors are refusals even if no user code is on the call stack."""


def refusal_sentence(error: BaseException) -> str:
    """Return a refusal's one-line text: its message, and the lines of user code that led to it.

    Returns "" if `error` is not a refusal.
    """
    if not isinstance(error, ShardwiseError) or isinstance(error, CollectiveError):
        return ""
    files = _files(error.__traceback__)
    users = [number for number, file in enumerate(files) if is_users(file)]
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    if not users and not _BEFORE_USERS.isdisjoint(files):
        return message
    # The error is a refusal only if our code raised it. User code may raise our error classes too.
    if not users or not any(OURS in file.parents for file in files[users[-1] :]):
        return ""
    # If an error in user code, such as a callback, caused ours, the user needs its traceback.
    if any(any(map(is_users, _files(cause.__traceback__))) for cause in _causes(error)):
        return ""
    *before, last = _users_frames(error.__traceback__)
    way = "".join(f"{_place(frame)} > " for frame in before)
    return f"{message} [{way}{_line(last)}]"


def users_line(trace: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback, or "" if there is none."""
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
    """Return the file of each frame in a traceback, outermost first."""
    found = []
    for frame, _ in traceback.walk_tb(trace):
        name = frame.f_code.co_filename
        # Generated code, such as a dataclass's __init__, has no file, so use its module's file.
        # Other code uses its own file, because with --adopt the user's script runs in a module
        # whose __file__ is ours.
        found.append(frame.f_globals.get("__file__", name) if name.startswith("<") else name)
    return [Path(each) for each in found]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that `error`'s traceback would show as its causes."""
    seen = [error]
    while True:
        found = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if found is None or found in seen:
            return
        yield found
        seen.append(found)
        error = found


def is_users(file: Path) -> bool:
    """Return whether `file` is user code, not part of Shardwise, torch or the standard library."""
    # An installed package counts as user code, because the user's own project may be installed.
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
