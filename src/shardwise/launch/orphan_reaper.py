"""Ends orphaned ranks whose launcher was killed (kill -9) and could not end them itself.

The reaper is a separate process that only reads its standard input: first a line with the folder of
the run, then "+PID" for each process group that started and "-PID" for each that ended. The end of
the input means that the launcher is gone, for any reason. Process groups exist on every Unix, and
unlike the kernel's parent-death signal, a signal to a group also reaches DataLoader workers and the
children of shells.

An agent on another host may be stopped (SIGSTOP) rather than killed. So its reaper expects a line
every second, and kills the agent and its ranks after `limit` seconds without one.

The reaper runs as a script from its own folder, so that a kill by the name of the command does not
hit it. Therefore this file imports nothing of the package.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

PATIENCE = 2.0
"""Seconds between SIGTERM, after which helper processes free shared memory, and SIGKILL."""


LAST_WAIT = PATIENCE + 3.0
"""Seconds that the reaper has to end the remaining processes, before the launcher does it itself.
"""


class OrphanReaper:
    """The launcher's side of the reaper. A context manager.

    Args:
        folder: A folder to remove at the end.
        limit: Seconds of silence after which the reaper takes this process for stopped. With a
            limit, call `beat` every second.
    """

    def __init__(self, folder: Path | None = None, limit: float | None = None) -> None:
        script = Path(__file__)
        self._folder = folder
        self._groups: set[int] = set()
        # -I and -S: without site-packages Python starts in milliseconds, and the environment of the
        # user cannot change what the reaper runs.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script.name, *([] if limit is None else [str(limit)])],
            cwd=script.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # If somebody stops the reaper, its pipe fills up. That must not block this process.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write(str(folder or ""))

    def started(self, group: int) -> None:
        """Add the process group `group`."""
        self._groups.add(group)
        self._write(f"+{group}")

    def ended(self, group: int) -> None:
        """Remove the process group `group`, which is empty."""
        self._groups.discard(group)
        self._write(f"-{group}")

    def beat(self) -> None:
        """Tell the reaper that this process is running."""
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
        # If somebody has stopped or killed the reaper, do its work here.
        if not end_within(self._process, LAST_WAIT) or self._process.returncode != 0:
            _end_run(self._groups, self._folder)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), os.fsencode(f"{line}\n"))
        except (BrokenPipeError, BlockingIOError):  # the run continues without its reaper
            return


def end_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for `process` to end, and kill it after `seconds`. Return whether it ended in time."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:  # only SIGKILL ends a process that is stopped (SIGSTOP)
        process.kill()
        process.wait()
        return False
    return True


def watch(fd: int, limit: float | None) -> None:
    """Read lines from `fd` until it ends, then end the remaining groups and remove the folder."""
    watched, groups = os.getppid(), set[int]()
    lines = _lines(fd, limit)
    folder = next(lines, "")
    for line in lines:
        if line is None:
            if os.getppid() == watched:  # otherwise it has just ended
                os.kill(watched, signal.SIGKILL)
            break
        if line:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    _end_run(groups, Path(folder) if folder else None)


def _lines(fd: int, limit: float | None) -> Iterator[str | None]:
    """Yield the lines from `fd`, and None after `limit` seconds without one."""
    # Count waits of one second rather than compare clocks: if the whole host is suspended, the
    # watched process is not silent.
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
    """End the remaining process groups, and remove the folder of the run."""
    end_groups(groups, PATIENCE)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def end_groups(groups: Iterable[int], patience: float) -> None:
    """Send SIGTERM to each of `groups`, and SIGKILL to those left after `patience` seconds."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + patience
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group. Return whether any process could receive it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    watch(sys.stdin.fileno(), float(sys.argv[1]) if len(sys.argv) > 1 else None)
