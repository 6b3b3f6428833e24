"""Forks the ranks of `sw.launch`, which share everything that the parent has in memory.

    parent, main thread    ─▶ a new thread ─▶ fork          waits until the rank leads a session
    rank                      the main thread ─▶ descriptors, signals, variables ─▶ the function

multiprocessing performs the fork, so that the rank forgets the parent's own children.
"""

import atexit
import builtins
import faulthandler
import fcntl
import io
import multiprocessing.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import popen_fork
from multiprocessing.context import ForkProcess

from shardwise.errors import LaunchError
from shardwise.launch.worker import Begin, Process, Streams
from shardwise.net import error_file
from shardwise.net.environment import REPORTS_VARIABLE

FORKED_IN_THREADS = r".*use of fork\(\) may lead to deadlocks"
"""The warning of Python 3.12 and later when a process with threads forks."""


def fork(run: Callable[[], None], kept: Collection[int], stack: ExitStack) -> Begin:
    """Return a function that forks a rank. Call this before the launcher opens any file.

    Args:
        run: Called in the rank.
        kept: Descriptors that the rank keeps.
        stack: Closes our descriptor of the rank after its end.
    """
    # A rank closes all descriptors that were opened after this call. One of them is the pipe whose
    # end tells the orphan reaper that the launcher is gone.
    before = {*_open_descriptors(), *kept}

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        opened = _open_descriptors() - {*before, *pass_fds}
        ready, ready_writer = os.pipe()
        rank = _ForkedRank(run, environ, streams, {*opened, ready}, ready_writer)
        try:
            child = _in_new_thread(lambda: popen_fork.Popen(rank))
            stack.callback(child.close)
            os.close(ready_writer)
            # Wait until the rank leads its process group: a signal to the group would fail before.
            if not os.read(ready, 1):
                raise LaunchError("A forked rank ended before it called the function.")
        finally:
            os.close(ready)
        return child

    return begin


class _ForkedRank(ForkProcess):
    """A rank as a forked process of multiprocessing."""

    # Processes that the rank itself starts use the default start method.
    _start_method = None  # type: ignore[assignment]

    def __init__(
        self,
        run: Callable[[], None],
        environ: Mapping[str, str],
        streams: Streams,
        closes: Collection[int],
        ready: int,
    ) -> None:
        super().__init__(name="MainProcess")
        self._run = run
        self._environ = environ
        self._streams = streams
        self._closes = closes
        self._ready = ready

    def run(self) -> None:
        """Detach from the parent, and call the function."""
        atexit._clear()  # the callbacks belong to the parent
        atexit.register(vars(multiprocessing.util)["_exit_function"])
        os.setsid()
        _redirect(self._streams)
        for fd in self._closes:
            with suppress(OSError):  # the listing of open descriptors had one itself
                os.close(fd)
        begin_anew(self._environ)
        _leave_notebook()
        if "torch" in sys.modules:  # it read the parent's OMP_NUM_THREADS when it was imported
            threads = int(os.environ["OMP_NUM_THREADS"].split(",")[0])
            sys.modules["torch"].set_num_threads(threads)
        os.write(self._ready, b"+")
        os.close(self._ready)
        try:
            self._run()
        finally:
            atexit._run_exitfuncs()


def begin_anew(environ: Mapping[str, str]) -> None:
    """Reset signals, variables and streams of a forked process, as in a new process.

    Call this in the main thread, after descriptors 0, 1 and 2 were replaced.
    """
    signal.set_wakeup_fd(-1)  # the pipe is shared with the parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # signals that the parent ignores stay ignored
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.excepthook = sys.__excepthook__
    if REPORTS_VARIABLE in os.environ:  # as `import shardwise` does in a rank
        error_file.watch_before_joining()
    _open_streams(buffered=not os.environ.get("PYTHONUNBUFFERED"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _open_streams(*, buffered: bool) -> None:
    """Open standard output and error as the interpreter does when it starts."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__") or getattr(sys, name)  # a notebook replaces sys.NAME
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


def _in_new_thread(function: Callable[[], popen_fork.Popen]) -> popen_fork.Popen:
    """Call `function` in a new thread, which becomes the main thread of a forked child."""
    # GNU OpenMP has a pool of threads for each thread that has computed something. A child that is
    # forked from such a thread waits forever for the pool, whose threads it does not have.
    children: list[popen_fork.Popen] = []
    errors: list[BaseException] = []

    def fork_child() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", FORKED_IN_THREADS, DeprecationWarning)
                children.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fork_child, name="MainThread")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return children[0]


def _redirect(streams: Streams) -> None:
    """Replace descriptors 0, 1 and 2 by `streams`."""
    empty = os.open(os.devnull, os.O_RDONLY)
    wanted = [empty if fd is not None and fd < 0 else fd for fd in streams]
    # First copy all to numbers above 2, so that none is overwritten before it is moved.
    high = [None if fd is None else fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in wanted]
    for place, fd in enumerate(high):
        if fd is not None:
            os.dup2(fd, place)


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def _leave_notebook() -> None:
    """Hide the notebook from libraries, because its display and input belong to the kernel."""
    if "IPython" not in sys.modules:
        return
    for name in ("get_ipython", "display"):
        vars(builtins).pop(name, None)

    def no_input(prompt: object = "") -> str:
        """Replace `input`, which would wait forever for the kernel of the notebook."""
        raise EOFError("A rank has no standard input.")

    builtins.input = no_input
    shell = sys.modules["IPython"].get_ipython()
    if shell is not None:
        type(shell).clear_instance()
