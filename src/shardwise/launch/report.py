"""A rank's last words: what it died of, written where its launcher looks.

When several ranks fail, most of them only report that another one is gone. Each rank that dies
of an exception leaves a report with the time, so that the launcher can show the first cause.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from shardwise.errors import CollectiveError

DIRECTORY_VARIABLE = "SHARDWISE_LAUNCH_REPORTS"
RANK_VARIABLE = "SHARDWISE_LAUNCH_RANK"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Why a rank died. `secondary` when the cause is likely on another rank.

    `message` is the last line, `text` the whole traceback, `where` the user's own line that it
    went through last ("" if none), `time` in seconds since the epoch.
    """

    rank: int
    time: float
    secondary: bool
    message: str
    text: str
    where: str = ""


def watch_exceptions() -> None:
    """From now on an uncaught exception in the main thread leaves a report, where one is wanted."""
    if DIRECTORY_VARIABLE not in os.environ or sys.excepthook is _report_and_show:
        return
    sys.excepthook = _report_and_show


def _report_and_show(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Leave the report and show the traceback; one line where the cause lies elsewhere.

    Written past sys.stderr, which torch.distributed wraps in a prefix of its own by then.
    """
    text = "".join(traceback.format_exception(kind, error, trace))
    shown = text
    if isinstance(error, KeyboardInterrupt | CollectiveError):
        shown = f"{_message(error)} [{_users_line(trace)}]\n"
    if not isinstance(error, KeyboardInterrupt):
        write(Path(os.environ[DIRECTORY_VARIABLE]), error, text)
    if sys.__stderr__ is not None:
        sys.__stderr__.write(shown)
        sys.__stderr__.flush()


def write(folder: Path, error: BaseException, text: str) -> None:
    """Leave the report of this rank in `folder`, whole or not at all."""
    rank = int(os.environ[RANK_VARIABLE])
    report = Report(
        rank=rank,
        time=time.time(),
        secondary=isinstance(error, CollectiveError),
        message=_message(error),
        text=text,
        where=_users_line(error.__traceback__),
    )
    aside = folder / f".{rank}.json"
    aside.write_text(json.dumps(asdict(report)))
    aside.rename(folder / f"{rank}.json")


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _users_line(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither ours nor of an installed package."""
    libraries = {Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))}
    libraries |= {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    for frame in reversed(traceback.extract_tb(trace)):
        if not libraries & set(Path(frame.filename).parents):
            name = frame.filename.removeprefix(f"{Path.cwd()}{os.sep}")
            return f"{name}:{frame.lineno}: {frame.line}"
    return ""


def read(folder: Path) -> dict[int, Report]:
    """The reports that ranks have left in `folder`, by rank."""
    found = (Report(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json"))
    return {report.rank: report for report in found}


def environment(folder: Path) -> Mapping[str, str]:
    """The variable that makes a rank leave its report in `folder`."""
    return {DIRECTORY_VARIABLE: str(folder)}
