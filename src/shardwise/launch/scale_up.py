"""Adds workers to a run that was started with `--survive` (`shardwise scale-up`).

    shardwise scale-up ── {"workers": 2} ──▶ Unix socket of the launcher ─▶ starts two spares
                       ◀─ {"ranks": [4, 5]}

The socket is in a folder that only this user can access. Each new worker joins the others between
two steps, as a spare does.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config.values import MOST_ON_A_HOST
from shardwise.errors import LaunchError
from shardwise.net import private_files

_PREFIX = "scale-up-"
SECONDS = 5.0
"""Limit for the wait for the launcher's answer."""

LONGEST = 4096
"""Maximum length of a request or an answer in bytes."""

PENDING = 8
"""Maximum number of connections without a complete request. The oldest is closed for a further."""


class ScaleUpSocket:
    """The launcher's socket, which accepts requests for more workers.

    The launcher never waits for the other end of a connection.

    Args:
        selector: Selector of the event loop.
        add: Starts a number of workers, and returns their ranks. Raises LaunchError if the run
            cannot grow.
    """

    def __init__(
        self, selector: selectors.BaseSelector, add: Callable[[int], Sequence[int]]
    ) -> None:
        self._selector, self._add = selector, add
        self._requests: dict[socket.socket, bytes] = {}
        """The bytes received from each open connection, oldest first."""
        self._path = private_files.folder() / f"{_PREFIX}{os.getpid()}"
        draft = self._path.with_name(f".{self._path.name}")
        draft.unlink(missing_ok=True)  # of an earlier process with this id
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(draft) as path:
            self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        # A client removes a socket that refuses connections, as this one did before `listen`.
        draft.rename(self._path)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close and remove the socket."""
        for connection in list(self._requests):
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with suppress(OSError):  # the other end has closed
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._requests) == PENDING:
                self._drop(next(iter(self._requests)))
            self._requests[connection] = b""
            self._selector.register(
                connection, selectors.EVENT_READ, partial(self._receive, connection)
            )

    def _receive(self, connection: socket.socket) -> None:
        """Read the received bytes, and answer the request if it is complete."""
        if connection not in self._requests:
            return  # closed by an earlier event of the same turn
        try:
            data = connection.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        request = self._requests[connection] = self._requests[connection] + data
        if data and b"\n" not in request and len(request) < LONGEST:
            return
        if request:
            with suppress(OSError):  # the other end has closed
                connection.send(json.dumps(self._answer(request)).encode() + b"\n")
        self._drop(connection)

    def _answer(self, request: bytes) -> dict[str, Any]:
        try:
            workers = json.loads(request.partition(b"\n")[0])["workers"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": 'A request has the form {"workers": 2}.'}
        if type(workers) is not int or not 1 <= workers <= MOST_ON_A_HOST:
            return {"error": f"workers must be a whole number from 1 to {MOST_ON_A_HOST}."}
        try:
            return {"ranks": list(self._add(workers))}
        except LaunchError as error:
            return {"error": str(error)}

    def _drop(self, connection: socket.socket) -> None:
        del self._requests[connection]
        self._selector.unregister(connection)
        connection.close()


def scale_up(workers: int, run: int | None) -> list[int]:
    """Ask the launcher with the process id `run` to add `workers`. Return their ranks.

    If `run` is None, there must be exactly one run on this host that can grow.

    Raises LaunchError if there is no such run, or if it cannot grow.
    """
    with ExitStack() as stack:
        found = _connect_to_runs(stack)
        if run is None and len(found) == 1:
            (run,) = found
        if run is None or run not in found:
            listed = ", ".join(map(str, sorted(found))) or "none"
            if run is None and found:
                raise LaunchError(
                    f"Several runs of this user on this host can grow: {listed}. Name one by the "
                    f"process id of its launcher: shardwise scale-up --run {min(found)}."
                )
            which = "no run" if run is None else f"no run with the process id {run}"
            raise LaunchError(
                f"There is {which} on this host that can grow. Runs of this user with --survive: "
                f"{listed}. Start one with shardwise run --survive K. If a run uses another folder "
                "for temporary files, set TMPDIR as the run does."
            )
        try:
            found[run].sendall(json.dumps({"workers": workers}).encode() + b"\n")
            answer = json.loads(found[run].makefile("rb").readline(LONGEST))
            if "error" not in answer:
                return [int(rank) for rank in answer["ranks"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"The launcher {run} does not answer: {error}.") from None
    raise LaunchError(answer["error"])


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name of `path`, because the kernel limits a socket's name to 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _connect_to_runs(stack: ExitStack) -> dict[int, socket.socket]:
    """Connect to all of this user's launchers. Return the sockets, by process id.

    Remove the sockets of launchers that have ended. `stack` closes the connections. Raises
    LaunchError if other users may access the folder with the sockets.
    """
    found: dict[int, socket.socket] = {}
    if not os.path.lexists(private_files.folder_path()):
        return found
    for path in private_files.folder().iterdir():
        if (match := re.fullmatch(rf"{_PREFIX}([0-9]+)", path.name)) is None:
            continue
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(SECONDS)
        try:
            with _short(path) as name:
                connection.connect(name)
        # A launcher in another container that shares the folder has a process id of that container,
        # so only the socket itself shows whether the launcher runs.
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            continue  # removed meanwhile, or not a socket
        else:
            found[int(match[1])] = connection
    return found
