"""Forks the ranks of `sw.launch`, each with everything that its parent has in memory.

    parent, main thread    ─▶ a new thread ─▶ fork          waits until the rank leads a session
    rank                      the main thread ─▶ descriptors, signals, variables ─▶ the function

multiprocessing does the fork itself, so that the rank forgets the parent's own children.
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
"""The warning of Python 3.12 and later at each fork of a process with threads."""


def fork(run: Callable[[], None], kept: Collection[int], stack: ExitStack) -> Begin:
    """Return a starter that forks a rank. The rank calls `run`, and keeps the descriptors `kept`.
    `stack` closes ours to it, after it has ended.

    Call this before the launcher opens anything. A forked rank closes all later descriptors, such
    as the pipe whose end tells the orphan reaper that the launcher is gone.
    """
    before = {*_open_descriptors(), *kept}

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        opened = _open_descriptors() - {*before, *pass_fds}
        said, says = os.pipe()
        rank = _ForkedRank(run, environ, streams, {*opened, said}, says)
        try:
            child = _in_new_thread(lambda: popen_fork.Popen(rank))
            stack.callback(child.close)
            os.close(says)
            # The rank must lead a process group before anybody may signal that.
            if not os.read(said, 1):
                raise LaunchError("A forked rank ended before it began.")
        finally:
            os.close(said)
        return child

    return begin


class _ForkedRank(ForkProcess):
    """A rank as multiprocessing forks processes, which forgets the parent's own children."""

    # Processes that the rank itself starts use the default method.
    _start_method = None  # type: ignore[assignment]

    def __init__(
        self,
        run: Callable[[], None],
        environ: Mapping[str, str],
        streams: Streams,
        closes: Collection[int],
        says: int,
    ) -> None:
        super().__init__(name="MainProcess")
        self._run = run
        self._environ = environ
        self._streams = streams
        self._closes = closes
        self._says = says

    def run(self) -> None:
        """Cut the ties to the parent, and call the function."""
        atexit._clear()  # they are the parent's
        atexit.register(vars(multiprocessing.util)["_exit_function"])
        os.setsid()
        _redirect(self._streams)
        for fd in self._closes:
            with suppress(OSError):  # the one that listed the others
                os.close(fd)
        begin_anew(self._environ)
        _leave_notebook()
        if "torch" in sys.modules:  # which has read the parent's OMP_NUM_THREADS at its import
            threads = int(os.environ["OMP_NUM_THREADS"].split(",")[0])
            sys.modules["torch"].set_num_threads(threads)
        os.write(self._says, b"+")
        os.close(self._says)
        try:
            self._run()
        finally:
            atexit._run_exitfuncs()


def begin_anew(environ: Mapping[str, str]) -> None:
    """Make a forked process look as if it had been started: signals, variables and streams.

    Call this in the main thread, after descriptors 0, 1 and 2 were replaced.
    """
    signal.set_wakeup_fd(-1)  # its pipe is the parent's too
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # signals that the parent ignores (nohup) stay so
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


def _in_new_thread(function: Callable[[], popen_fork.Popen]) -> popen_fork.Popen:
    """Call `function` in a thread that has not computed anything yet.

    GNU OpenMP keeps its pool of threads for each thread that computes. A process that is forked by
    such a thread waits for ever for the pool, which it does not have. The thread that forks is the
    main thread of the child.
    """
    made: list[popen_fork.Popen] = []
    failed: list[BaseException] = []

    def forks() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", FORKED_IN_THREADS, DeprecationWarning)
                made.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=forks, name="MainThread")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _redirect(streams: Streams) -> None:
    """Put `streams` in the place of descriptors 0, 1 and 2."""
    empty = os.open(os.devnull, os.O_RDONLY)
    wanted = [empty if fd is not None and fd < 0 else fd for fd in streams]
    # Above the three first, so that none is overwritten before it has been moved.
    high = [None if fd is None else fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in wanted]
    for place, fd in enumerate(high):
        if fd is not None:
            os.dup2(fd, place)


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def _leave_notebook() -> None:
    """Hide the notebook from libraries: its display and input belong to the kernel."""
    if "IPython" not in sys.modules:
        return
    for name in ("get_ipython", "display"):
        vars(builtins).pop(name, None)

    def no_input(prompt: object = "") -> str:
        """Replace `input`, which would wait for the kernel of the notebook for ever."""
        raise EOFError("A rank has no standard input.")

    builtins.input = no_input
    shell = sys.modules["IPython"].get_ipython()
    if shell is not None:
        type(shell).clear_instance()
