"""Adds workers to a run that was started with `--survive` (`shardwise scale-up`).

    shardwise scale-up ── {"workers": 2} ──▶ Unix socket of the launcher ─▶ starts two spares
                       ◀─ {"ranks": [4, 5]}

The socket is in a folder that only this user can access. Each new worker joins the others between
two steps, as a spare does.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.net import private_files

_PREFIX = "scale-up-"
SECONDS = 5.0
"""Limit for the wait for the launcher's answer."""

HEARING = 0.5
"""Limit for the wait for a request, during which the launcher does nothing else."""


class ScaleUpSocket:
    """The launcher's socket, which accepts requests for more workers.

    Args:
        selector: Selector of the event loop.
        add: Starts a number of workers, and returns their ranks. Raises LaunchError if the run
            cannot grow.
    """

    def __init__(
        self, selector: selectors.BaseSelector, add: Callable[[int], Sequence[int]]
    ) -> None:
        self._selector, self._add = selector, add
        self._path = private_files.folder() / f"{_PREFIX}{os.getpid()}"
        self._path.unlink(missing_ok=True)  # of an earlier process with this id
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(self._path) as path:
            self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._serve)

    def close(self) -> None:
        """Close and remove the socket."""
        self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        # The other end has closed, or sends something else.
        with suppress(OSError, ValueError, KeyError, TypeError):
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw") as file:
                connection.settimeout(HEARING)
                question = json.loads(file.readline())
                answer: dict[str, Any]
                try:
                    answer = {"ranks": list(self._add(int(question["workers"])))}
                except LaunchError as error:
                    answer = {"error": str(error)}
                file.write(json.dumps(answer) + "\n")
                file.flush()


def scale_up(workers: int, run: int | None) -> list[int]:
    """Ask the launcher with the process id `run` to add `workers`. Return their ranks.

    If `run` is None, there must be exactly one run on this host that can grow.

    Raises LaunchError if there is no such run, or if it cannot grow.
    """
    found = _sockets()
    if run is None and len(found) == 1:
        (run,) = found
    if run is None or run not in found:
        listed = ", ".join(map(str, sorted(found))) or "none"
        which = "" if run is None else f" with the process id {run}"
        raise LaunchError(
            f"There is not exactly one run{which} on this host that can grow. Runs of this user "
            f"with --survive: {listed}. Name one by the process id of its launcher: shardwise "
            "scale-up --run PID. With another folder for temporary files, set TMPDIR as the run "
            "does."
        )
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            with _short(found[run]) as path:
                connection.connect(path)
            with connection.makefile("rw") as file:
                file.write(json.dumps({"workers": workers}) + "\n")
                file.flush()
                answer = json.loads(file.readline())
    except (OSError, ValueError) as error:
        raise LaunchError(f"The launcher {run} does not answer: {error}.") from None
    if "error" in answer:
        raise LaunchError(answer["error"])
    return list(answer["ranks"])


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name of `path`, because the kernel limits a socket's name to 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _sockets() -> dict[int, Path]:
    """Return the sockets of this user's launchers by process id. Remove those of dead ones."""
    found = {}
    for path in private_files.folder_path().glob(f"{_PREFIX}*"):
        number = int(path.name.removeprefix(_PREFIX))
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        else:
            found[number] = path
    return found
