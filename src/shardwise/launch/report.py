"""A rank's last words: what it died of, written where its launcher looks.

When several ranks fail, most of them only report that another one is gone. Each rank that dies
of an exception leaves a report with the time, so that the launcher can show the first cause. What
was refused on all ranks alike the launcher shows, once; without one each rank does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise import launch
from shardwise.errors import CollectiveError, LaunchError, ShardwiseError
from shardwise.launch import own
from shardwise.launch.refusal import sentence, users_line

DIRECTORY_VARIABLE = "SHARDWISE_LAUNCH_REPORTS"
RANK_VARIABLE = "SHARDWISE_LAUNCH_RANK"


@dataclass(frozen=True, kw_only=True)
class Report:
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
    """From now on an uncaught exception in the main thread leaves a report where one is wanted, and
    a refusal is shown as a sentence."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Shows an uncaught exception; `before` does where no launcher of ours waits for a report.

    Written past sys.stderr, which torch.distributed wraps in a prefix of its own by then.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        refused = sentence(error)
        told = f"shardwise: {_speaker()}{refused}\n" if refused else ""
        if DIRECTORY_VARIABLE not in os.environ:
            if not told or self._before is not sys.__excepthook__:  # one that others have set
                self._before(kind, error, trace)
            if told:
                _show(told)
            return
        text = "".join(traceback.format_exception(kind, error, trace))
        alone = os.environ.get(own.NAMES["size"], "1") == "1"
        is_shown_for_us = bool(refused) and not alone and not _blames(error)
        if not isinstance(error, KeyboardInterrupt):
            folder = Path(os.environ[DIRECTORY_VARIABLE])
            try:
                write(folder, error, text, refusal=refused if is_shown_for_us else "")
            except OSError:  # a full disk: then this rank says it itself
                is_shown_for_us = False
        if isinstance(error, KeyboardInterrupt) or _blames(error):
            _show(f"{_message(error)} [{users_line(trace)}]\n")
        elif not is_shown_for_us:
            _show(told or text)


def _show(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()


def _speaker() -> str:
    """Which of several ranks this is; nobody knows whether the others would say the same."""
    try:
        identity = launch.detect(os.environ)
    except LaunchError:  # which is what is to be told
        return ""
    return "" if identity.size == 1 else f"rank {identity.rank} of {identity.size}: "


def write(folder: Path, error: BaseException, text: str, refusal: str = "") -> None:
    """Leave the report of this rank in `folder`, whole or not at all."""
    rank = int(os.environ[RANK_VARIABLE])
    report = Report(
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


def read(folder: Path) -> dict[int, Report]:
    """The reports that ranks have left in `folder`, by rank."""
    found = (Report(**json.loads(path.read_text())) for path in folder.glob("[0-9]*.json"))
    return {report.rank: report for report in found}


def environment(folder: Path) -> Mapping[str, str]:
    """The variable that makes a rank leave its report in `folder`."""
    return {DIRECTORY_VARIABLE: str(folder)}
