"""Kills the ranks of a launcher that was itself killed (kill -9) and could not stop them.

The reaper is a separate process that reads its standard input. The first line is the run's folder.
In the lines that follow, "+PID" registers a process group that was started, and "-PID" unregisters
one that is empty. If the launcher exits for any reason, the input is closed, and the reaper kills
the remaining groups. It uses process groups because they exist on every Unix. A signal to a group
also reaches DataLoader workers and the children of shells, unlike the kernel's parent-death signal.

An agent on another host may be stopped (SIGSTOP) rather than killed. Its reaper therefore expects a
line every second. After `limit` seconds without one, it kills the agent and its ranks.

The reaper runs as a script from its own folder, so that it survives if processes are killed by the
command's name. This file must therefore not import anything from the package.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

PATIENCE = 2.0
"""Seconds between SIGTERM and SIGKILL. Helper processes use this time to free shared memory."""


LAST_WAIT = PATIENCE + 3.0
"""Time limit in seconds for the reaper to kill the remaining processes. Then the launcher does."""


class OrphanReaper:
    """Context manager that runs a reaper process for this launcher or agent.

    Args:
        folder: Folder that the reaper removes at the end, or None.
        limit: Seconds without a line after which the reaper assumes that this process is stopped.
            If `limit` is set, `beat` must be called every second.
    """

    def __init__(self, folder: Path | None = None, limit: float | None = None) -> None:
        script = Path(__file__)
        self._folder = folder
        self._groups: set[int] = set()
        # With -I and -S, Python starts in milliseconds, because it ignores site-packages, and the
        # user's environment cannot affect the reaper.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script.name, *([] if limit is None else [str(limit)])],
            cwd=script.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal must not kill the reaper
        )
        assert self._process.stdin is not None
        # If the reaper is stopped, its pipe fills up. That must not block this process.
        os.set_blocking(self._process.stdin.fileno(), False)
        _living.add(self)
        self._write(str(folder or ""))

    def started(self, group: int) -> None:
        """Register the process group `group`, which has just been started."""
        self._groups.add(group)
        self._write(f"+{group}")

    def ended(self, group: int) -> None:
        """Unregister the process group `group`, which is empty."""
        self._groups.discard(group)
        self._write(f"-{group}")

    def beat(self) -> None:
        """Tell the reaper that this process is still running."""
        self._write("")

    def __enter__(self) -> "OrphanReaper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        # If the reaper was stopped or killed, do its work here.
        if not end_within(self._process, LAST_WAIT) or self._process.returncode != 0:
            _end_run(self._groups, self._folder)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), os.fsencode(f"{line}\n"))
        except (BrokenPipeError, BlockingIOError):  # the run continues without its reaper
            return


_living: WeakSet[OrphanReaper] = WeakSet()


def register_forked(descriptors: Collection[int]) -> None:
    """Register the process group of this process with the reaper of the launcher that forked it.

    Otherwise, a launcher that is killed before it registers the group would leave it behind.

    Args:
        descriptors: Descriptors that the launcher has opened. One of them is the reaper's input.
    """
    for reaper in _living:
        stdin = reaper._process.stdin
        if stdin is not None and not stdin.closed and stdin.fileno() in descriptors:
            reaper._write(f"+{os.getpid()}")


def end_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for `process` to exit; kill it after `seconds`. Return whether it exited in time."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:  # SIGKILL works even if the process is stopped (SIGSTOP)
        process.kill()
        process.wait()
        return False
    return True


def watch(fd: int, limit: float | None) -> None:
    """Run the reaper: read lines from `fd` until it is closed, then kill the remaining groups.

    Also removes the run's folder.

    Args:
        fd: Descriptor to read from.
        limit: Seconds without a line after which the parent process is killed too, or None.
    """
    watched, groups = os.getppid(), set[int]()
    lines = _lines(fd, limit)
    folder = next(lines, "")
    for line in lines:
        if line is None:
            if os.getppid() == watched:  # otherwise the parent has just exited
                os.kill(watched, signal.SIGKILL)
            break
        if line:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    _end_run(groups, Path(folder) if folder else None)


def _lines(fd: int, limit: float | None) -> Iterator[str | None]:
    """Yield the lines from `fd`, and None after `limit` seconds without one."""
    # Count waits of one second instead of comparing clocks. A clock may advance while the entire
    # host is suspended, but that time must not count as silence.
    rest, silent = b"", 0
    while limit is None or silent < limit:
        if limit is not None and not select.select([fd], [], [], 1.0)[0]:
            silent += 1
            continue
        silent = 0
        data = os.read(fd, 2**16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from map(os.fsdecode, whole)
    yield None


def _end_run(groups: Iterable[int], folder: Path | None) -> None:
    """Kill the remaining process groups, and remove the run's folder."""
    end_groups(groups, PATIENCE)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def end_groups(groups: Iterable[int], patience: float) -> None:
    """Send SIGTERM to `groups`, and SIGKILL to those that still exist after `patience` seconds."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + patience
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group. Return False if no process could receive it.

    Signal 0 only tests whether the group still has a process.
    """
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    watch(sys.stdin.fileno(), float(sys.argv[1]) if len(sys.argv) > 1 else None)
