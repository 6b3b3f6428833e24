"""Ends orphaned ranks, whose launcher was killed too suddenly to end them itself (kill -9).

A process of its own, which only reads its standard input: the folder of the run on the first
line, then "+PID" for each process group that started and "-PID" for each that ended. The end of
the input means that the launcher is gone, however it went. A process group takes DataLoader
workers and shells' children along, which the kernel's parent-death signal would not, and it
exists on every Unix.

It is started as a script from its own folder, so that nobody who kills by the name of the
command hits it; so it imports nothing of the package.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO

PATIENCE = 2.0
"""Seconds between SIGTERM, upon which helpers tidy shared memory, and SIGKILL."""


class OrphanReaper:
    """The launcher's side of the process; a context. `folder`, if any, is removed at the end."""

    def __init__(self, folder: Path | None = None) -> None:
        script = Path(__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script.name],
            cwd=script.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._write(str(folder or ""))

    def started(self, group: int) -> None:
        """Watch over the process group `group`."""
        self._write(f"+{group}")

    def ended(self, group: int) -> None:
        """Forget the process group `group`: it is empty."""
        self._write(f"-{group}")

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
        self._process.wait()

    def _write(self, line: str) -> None:
        """Write `line`; a reaper that was killed is no reason to stop the run."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            return


def watch(lines: TextIO) -> None:
    """Wait for the end of `lines`, then end what is left and remove the folder."""
    folder = lines.readline().rstrip("\n")
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end_groups(groups, PATIENCE)
    if folder:
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
    watch(sys.stdin)
