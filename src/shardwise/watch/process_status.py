"""The position of a thread in the user's code, and the state of a process of this host.

The position is read from Python's frames, the state from /proc.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from shardwise.messages.printable import from_here

OURS = f"{Path(__file__).parents[1]}{os.sep}"

STDERR = 2

DEPTH = 6
"""Number of a stack's frames to report: of the user's code, and of the calls inside it."""


OBJECTS = {
    "Engine": "engine",
    "Engines": "engines",
    "World": "world",
    "BatchRows": "world",
    "Loader": "loader",
    "Metrics": "metrics",
}
"""Our classes that users call, and the usual names of their objects."""

FUNCTIONS = {
    "init": "sw.init",
    "leave": "the end of the script",
    "Alike.__iter__": "world.alike",
}


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    ident = threading.main_thread().ident
    return None if ident is None else sys._current_frames().get(ident)


def show_on_signal() -> None:
    """Make SIGUSR2 print the stacks of all threads, unless the user handles this signal."""
    # faulthandler works in C, so also while Python code cannot run, in a wait or an endless loop.
    if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code, such as "train.py:71"; "" if none."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def library_call(frame: FrameType | None) -> str:
    """Return our function that the user's innermost line called: "engine.backward"; "" if none."""
    called = ""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(OURS):
            called = _as_called(frame.f_code.co_qualname)
        frame = frame.f_back
    return called


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return the stack that ends in `frame`, outermost first, a line for each frame."""
    if frame is None:
        return []
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame))
    # The user's frames matter most. Of the frames below them, show the first and the innermost.
    frames.reverse()
    cut = max((i for i, one in enumerate(frames) if _is_users(one.filename)), default=-1) + 1
    first, inner = frames[max(0, cut - DEPTH) : cut], frames[cut:]
    if len(inner) <= DEPTH:
        return [_stack_line(one) for one in (*first, *inner)]
    return [*map(_stack_line, (*first, inner[0])), "...", *map(_stack_line, inner[1 - DEPTH :])]


def _stack_line(one: traceback.FrameSummary) -> str:
    source = f": {one.line}" if one.line else ""
    return f"{_short(one.filename)}:{one.lineno} in {one.name}{source}"


def _as_called(qualified: str) -> str:
    """Return a function as a user writes it: Engine.backward is engine.backward, hooks forward."""
    owner, _, name = qualified.rpartition(".")
    if name == "__init__" and owner in OBJECTS:
        return f"sw.{owner}"
    if owner in OBJECTS and not name.startswith("_"):
        return f"{OBJECTS[owner]}.{name}"
    return FUNCTIONS.get(qualified, "forward")


_SITES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
"""Folders of libraries of any interpreter, because a venv may use packages of another one."""


def _is_users(file: str) -> bool:
    return not file.startswith(_libraries()) and not any(site in file for site in _SITES)


@cache  # sysconfig computes the paths again at each call, and a stack has many frames
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return "<frozen", OURS, *(f"{sysconfig.get_path(name)}{os.sep}" for name in names)


def _short(file: str) -> str:
    return from_here(file)


_STATES = {
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a disk or the kernel (D)",
    "R": "running (R)",
    "S": "asleep (S)",
}
ENDED = "ended"
SILENT = (_STATES["T"], _STATES["t"], ENDED)
"""States of a process that cannot answer."""


def process_start(pid: int | str = "self") -> int | None:
    """Return when a process began, in ticks since the boot; None if that cannot be read.

    It distinguishes the process from a later one with the same PID.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int, since: int | None) -> str | None:
    """Return the state of the process that began at `since`, in words; None if it is unknown."""
    if since is None:
        return None
    fields = _stat_fields(pid)
    if not fields or int(fields[19]) != since:
        return ENDED
    return _STATES.get(fields[0], fields[0])


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    # The field before the state is the name in parentheses, which may contain any character.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
