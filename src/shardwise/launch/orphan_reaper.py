"""Ends orphaned ranks, whose launcher was killed too suddenly to end them itself (kill -9).

A process of its own, which only reads its standard input: the folder of the run on the first
line, then "+PID" for each process group that started and "-PID" for each that ended. The end of
the input means that the launcher is gone, however it went. A process group takes DataLoader
workers and shells' children along, which the kernel's parent-death signal would not, and it
exists on every Unix.

An agent on another host may be stopped (SIGSTOP) instead of killed. Its reaper therefore expects a
line every second, and after `limit` seconds without one kills the agent and its ranks.

It is started as a script from its own folder, so that nobody who kills by the name of the
command hits it; so it imports nothing of the package.
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
"""Seconds between SIGTERM, upon which helpers tidy shared memory, and SIGKILL."""


LAST_WAIT = PATIENCE + 3.0
"""Seconds that the reaper has to end what is left, before the launcher does it itself."""


class OrphanReaper:
    """The launcher's side of the process; a context. `folder`, if any, is removed at the end.

    With a `limit` in seconds, call `beat` every second: the reaper takes this process for stopped
    after `limit` seconds of silence.
    """

    def __init__(self, folder: Path | None = None, limit: float | None = None) -> None:
        script = Path(__file__)
        self._folder = folder
        self._groups: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script.name, *([] if limit is None else [str(limit)])],
            cwd=script.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # The pipe of a stopped reaper fills up, which must not stop this process too.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write(str(folder or ""))

    def started(self, group: int) -> None:
        """Watch over the process group `group`."""
        self._groups.add(group)
        self._write(f"+{group}")

    def ended(self, group: int) -> None:
        """Forget the process group `group`: it is empty."""
        self._groups.discard(group)
        self._write(f"-{group}")

    def beat(self) -> None:
        """Tell the reaper that this process runs."""
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
        # Someone may have stopped or killed the reaper: then this process does its work.
        if not end_within(self._process, LAST_WAIT) or self._process.returncode != 0:
            _end_run(self._groups, self._folder)

    def _write(self, line: str) -> None:
        """Write `line`; a reaper that was killed or stopped is no reason to stop the run."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), os.fsencode(f"{line}\n"))
        except (BrokenPipeError, BlockingIOError):
            return


def end_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for the end of `process`, and kill it after `seconds`; whether it ended by itself."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:  # a process that is stopped (SIGSTOP) ends only by SIGKILL
        process.kill()
        process.wait()
        return False
    return True


def watch(fd: int, limit: float | None) -> None:
    """Wait for the end of the lines in `fd`, then end what is left and remove the folder."""
    watched, groups = os.getppid(), set[int]()
    lines = _lines(fd, limit)
    folder = next(lines, "")
    for line in lines:
        if line is None:
            if os.getppid() == watched:  # else it has ended just now
                os.kill(watched, signal.SIGKILL)
            break
        if line:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    _end_run(groups, Path(folder) if folder else None)


def _lines(fd: int, limit: float | None) -> Iterator[str | None]:
    """Yield the lines that come, and None after `limit` seconds without one.

    It counts seconds in which this process ran: a host that was suspended as a whole is not silent.
    """
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
    """End the process groups that are left, and remove the folder of the run."""
    end_groups(groups, PATIENCE)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def end_groups(groups: Iterable[int], patience: float) -> None:
    """SIGTERM to each of `groups`, and SIGKILL to those alive after `patience` seconds."""
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    until = time.monotonic() + patience
    while left and time.monotonic() < until:
        time.sleep(0.02)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; whether it has a member that could take it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    watch(sys.stdin.fileno(), float(sys.argv[1]) if len(sys.argv) > 1 else None)
