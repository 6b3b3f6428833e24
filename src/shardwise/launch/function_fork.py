"""Forks the ranks of `sw.launch`, so that they can use everything in the parent's memory.

    parent, main thread    ─▶ new thread ─▶ fork, then wait until the rank leads its own session
    rank                      main thread ─▶ descriptors, signals, variables ─▶ the function

multiprocessing performs the fork, so that the rank's list of children does not include the
parent's.
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
from shardwise.launch import orphan_reaper
from shardwise.launch.worker import Begin, Process, Streams
from shardwise.net import error_file, helper_folder
from shardwise.net.environment import REPORTS_VARIABLE

FORKED_IN_THREADS = r".*use of fork\(\) may lead to deadlocks"
"""Matches the warning of Python 3.12 and later when a process with several threads forks."""


def fork(run: Callable[[], None], kept: Collection[int], stack: ExitStack) -> Begin:
    """Return a function that forks a rank. Must be called before the launcher opens any file.

    Args:
        run: Function that the rank calls.
        kept: Descriptors that stay open in the rank.
        stack: Closes the parent's descriptor of each rank.
    """
    # A rank closes all descriptors that are opened after this call. One of them is the pipe to the
    # orphan reaper, which must be closed everywhere when the launcher exits.
    before = {*_open_descriptors(), *kept}

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        opened = _open_descriptors() - {*before, *pass_fds}
        ready, ready_writer = os.pipe()
        rank = _ForkedRank(run, environ, streams, {*opened, ready}, ready_writer)
        try:
            child = _in_new_thread(lambda: popen_fork.Popen(rank))
            stack.callback(child.close)
            os.close(ready_writer)
            # Wait until the rank leads its own process group, because signals to the group would
            # fail before that.
            if not os.read(ready, 1):
                raise LaunchError("A forked rank ended before it called the function.")
        finally:
            os.close(ready)
        return child

    return begin


class _ForkedRank(ForkProcess):
    """A rank that runs in a process forked by multiprocessing."""

    # None lets processes that the rank itself starts use the default start method.
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
        """Detach from the parent and call the function."""
        atexit._clear()  # the registered callbacks belong to the parent
        atexit.register(vars(multiprocessing.util)["_exit_function"])
        os.setsid()
        orphan_reaper.register_forked(self._closes)
        _redirect(self._streams)
        for fd in self._closes:
            with suppress(OSError):  # the list includes the descriptor that was used to create it
                os.close(fd)
        begin_anew(self._environ)
        _leave_notebook()
        if "torch" in sys.modules:  # torch reads OMP_NUM_THREADS only on import, so in the parent
            threads = int(os.environ["OMP_NUM_THREADS"].split(",")[0])
            sys.modules["torch"].set_num_threads(threads)
        os.write(self._ready, b"+")
        os.close(self._ready)
        try:
            self._run()
        finally:
            atexit._run_exitfuncs()


def begin_anew(environ: Mapping[str, str]) -> None:
    """Reset a forked process's signals, environment variables and streams, as in a new process.

    Must be called in the main thread, after descriptors 0, 1 and 2 have been replaced.
    """
    signal.set_wakeup_fd(-1)  # the pipe is shared with the parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # do not reset signals that the parent ignores
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.excepthook = sys.__excepthook__
    if REPORTS_VARIABLE in os.environ:  # in a new rank, `import shardwise` does this
        error_file.watch_before_joining()
        helper_folder.use_run_folder()
    _open_streams(buffered=not os.environ.get("PYTHONUNBUFFERED"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _open_streams(*, buffered: bool) -> None:
    """Open standard output and error as the interpreter does at startup."""
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
    """Call `function`, which forks, in a new thread. The thread becomes the child's main thread."""
    # GNU OpenMP has a thread pool for each thread that has run a parallel region. A child forked
    # from such a thread would wait forever for the pool, whose threads do not exist in it.
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
    """Replace descriptors 0, 1 and 2 with `streams`."""
    empty = os.open(os.devnull, os.O_RDONLY)
    wanted = [empty if fd is not None and fd < 0 else fd for fd in streams]
    # Copy all descriptors to numbers above 2 first, so that none is overwritten before its turn.
    high = [None if fd is None else fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in wanted]
    for place, fd in enumerate(high):
        if fd is not None:
            os.dup2(fd, place)


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd")}


def _leave_notebook() -> None:
    """Hide the notebook from libraries, because only its kernel can use its display and input."""
    if "IPython" not in sys.modules:
        return
    for name in ("get_ipython", "display"):
        vars(builtins).pop(name, None)

    def no_input(prompt: object = "") -> str:
        """Replacement for `input`, which would wait forever for the notebook's kernel."""
        raise EOFError("A rank has no standard input.")

    builtins.input = no_input
    shell = sys.modules["IPython"].get_ipython()
    if shell is not None:
        type(shell).clear_instance()
