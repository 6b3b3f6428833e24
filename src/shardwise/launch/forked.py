"""Makes a forked process look as if it had been started: signals, variables, standard streams."""

import faulthandler
import io
import os
import signal
import sys
from collections.abc import Mapping

from shardwise.net import error_file
from shardwise.net.environment import REPORTS_VARIABLE


def begin_anew(environ: Mapping[str, str]) -> None:
    """Replace the parent's signals, variables and streams by those of a new process.

    Call this in the main thread, after descriptors 0, 1 and 2 were replaced.
    """
    _reset_signals()
    os.environ.clear()
    os.environ.update(environ)
    sys.excepthook = sys.__excepthook__
    if REPORTS_VARIABLE in os.environ:  # as `import shardwise` does in a rank
        error_file.watch_before_joining()
    _open_streams(buffered=not os.environ.get("PYTHONUNBUFFERED"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _reset_signals() -> None:
    """Drop the parent's handlers. Signals that it ignores (nohup) stay ignored."""
    signal.set_wakeup_fd(-1)  # its pipe is the parent's too
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams(*, buffered: bool) -> None:
    """Open the standard output and error as the interpreter does at its start.

    A terminal is written to line by line. Unbuffered, no output is lost when the process is
    killed.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__") or getattr(sys, name)  # a notebook replaces the second
        file = os.fdopen(fd, "wb", -1 if buffered else 0, closefd=False)
        stream = io.TextIOWrapper(
            file,
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors=getattr(old, "errors", None),
            line_buffering=name == "stderr" or file.isatty(),
            write_through=not buffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
