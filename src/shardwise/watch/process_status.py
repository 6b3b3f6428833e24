"""Finds a thread's position in the user's code, and the state of a process on this host.

The position is read from Python frames, and the state from /proc.
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

BRIDGES = tuple(
    f"{OURS}{name}{os.sep}" for name in ("accelerate", "bridging", "lightning", "transformers")
)
"""Packages whose functions another library calls, such as a Trainer, and not the user."""

STDERR = 2

DEPTH = 6
"""Maximum number of stack frames to report: of the user's code, and again of the calls inside
it."""


OBJECTS = {
    "Engine": "engine",
    "Engines": "engines",
    "World": "world",
    "BatchRows": "world",
    "Loader": "loader",
    "Metrics": "metrics",
}
"""Maps public classes to the usual names of their objects."""

FUNCTIONS = {
    "init": "sw.init",
    "leave": "the end of the script",
    "Alike.__iter__": "world.alike",
}

FORWARD = "forward"

_MODULE = os.path.join("torch", "nn", "modules", "module.py")


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    ident = threading.main_thread().ident
    return None if ident is None else sys._current_frames().get(ident)


def show_on_signal() -> None:
    """Print the stacks of all threads on SIGUSR2, unless user code handles this signal."""
    # faulthandler is implemented in C, so it works even while Python code cannot run.
    if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code, such as "train.py:71", or "" if there is none."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def library_call(frame: FrameType | None) -> str:
    """Return the library function that user code has called, such as "engine.backward", or ""."""
    called, in_module = "", False
    while frame is not None and not _is_users(file := frame.f_code.co_filename):
        # Overwrite on the way outward, because the user called the outermost library function.
        if file.startswith(BRIDGES):
            # A bridge also calls internal functions outside a forward pass, for example in a setup.
            called = "" if called == FORWARD and not in_module else called
        elif file.startswith(OURS):
            called = _as_called(frame.f_code.co_qualname)
        in_module = in_module or file.endswith(_MODULE)
        frame = frame.f_back
    return called


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return the stack that ends in `frame`, one line per frame, outermost first."""
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
    """Return a function's name as users write it, such as engine.backward for Engine.backward.

    For internal functions, which only hooks in a forward pass call, returns "forward".
    """
    owner, _, name = qualified.rpartition(".")
    if name == "__init__" and owner in OBJECTS:
        return f"sw.{owner}"
    if owner in OBJECTS and not name.startswith("_"):
        return f"{OBJECTS[owner]}.{name}"
    return FUNCTIONS.get(qualified, FORWARD)


_SITES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
"""Library folders of any interpreter, because a venv may use another one's packages."""


def _is_users(file: str) -> bool:
    return not file.startswith(_libraries()) and not any(site in file for site in _SITES)


@cache  # sysconfig recomputes the paths at each call, and a stack has many frames
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return "<frozen", OURS, *(f"{sysconfig.get_path(name)}{os.sep}" for name in names)


def _short(file: str) -> str:
    return from_here(file)


STOPPED = "stopped (T)"

_STATES = {
    "T": STOPPED,
    "t": "stopped by a debugger (t)",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a disk or the kernel (D)",
    "R": "running (R)",
    "S": "asleep (S)",
}
ENDED = "ended"
SILENT = (STOPPED, _STATES["t"], ENDED)
"""States of a process that cannot answer."""


def process_start(pid: int | str = "self") -> int | None:
    """Return a process's start time in ticks since boot, or None if it cannot be read.

    The start time distinguishes the process from a later one with the same PID.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int, since: int | None) -> str | None:
    """Describe the state of process `pid`, which started at `since`. Return None if unknown."""
    if since is None:
        return None
    fields = _stat_fields(pid)
    # A different start time means that the PID was reused by a later process.
    if not fields or int(fields[19]) != since:
        return ENDED
    return _STATES.get(fields[0], fields[0])


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the state."""
    # The field before the state is the name in parentheses, which may contain any character.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
