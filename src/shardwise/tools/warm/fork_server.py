"""Fork server: a process that imports torch and the script's packages once, and then forks ranks.

    python -m shardwise.tools.warm.fork_server FD IMPORTS

Imports take up most of the time of a short run. rank_client.py requests a rank over a socket. The
rank is killed if its client exits, and all ranks are killed when the server's standard input is
closed. The server has no threads and never uses an accelerator, because neither survives a fork.

    rank_client  ── arguments, environment, files ─▶  fork_server  ── fork ─▶  rank
                 ── signals, one byte each ────────▶               ── kill ─▶
                 ◀──────────── exit code, 4 bytes ──               ◀─ wait ──
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shardwise.launch.function_fork import begin_anew
from shardwise.tools.warm.rank_client import FREE

STOCK_PACKAGES = ("numpy", "torch", "torch._dynamo", "torch.utils.data")
"""Modules that every rank of a stock script needs. torch._dynamo is included because the first
optimizer imports it."""

PACKAGES = (
    *(*STOCK_PACKAGES, "torch.distributed.pipelining", "shardwise.engine.engine"),
    "shardwise.data.loader",
)
"""Modules that every rank of Shardwise needs."""

PATIENCE = 2.0
"""Seconds that processes started by a rank may outlive it."""


@dataclass
class Child:
    """A forked rank, which leads a process group, and the socket that connects to its client."""

    pid: int
    line: socket.socket


class ForkServer:
    """Forks a rank for each client of `listener`."""

    def __init__(self, listener: socket.socket, reserved: list[int]) -> None:
        self._listener = listener
        self._reserved = reserved
        self._children: dict[int, Child] = {}
        self._orphans: dict[int, float] = {}
        """Process groups whose leader has exited, and when to kill their remaining processes."""
        self._woken, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> list[str] | None:
        """Serve clients until standard input is closed, then return None.

        This function also returns in each forked rank, with the rank's command-line arguments. The
        rank then runs its script.
        """
        self._wakes.setblocking(False)
        # set_wakeup_fd makes select() return when a child exits. It needs a handler, because an
        # ignored signal writes no byte.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for ready in (sys.stdin, self._listener, self._woken):
            self._selector.register(ready, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(PATIENCE if self._orphans else None):
                if key.fileobj is sys.stdin:
                    # The verifier has exited, so kill the ranks and the processes they started.
                    for group in (*self._children, *self._orphans):
                        _signal(group, signal.SIGKILL)
                    for pid in self._children:
                        os.waitpid(pid, 0)
                    return None
                if key.fileobj is self._listener:
                    if (arguments := self._accept()) is not None:
                        return arguments
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.data in self._children:
                    self._forward_signals(self._children[key.data])
            self._reap()

    def _accept(self) -> list[str] | None:
        """Fork a rank for the next client. Return its arguments in the rank, and None here."""
        line, _ = self._listener.accept()
        line.settimeout(PATIENCE)
        try:
            head, files, _, _ = socket.recv_fds(line, 8, FREE)
            request = json.loads(_receive(line, struct.unpack("!Q", head)[0]))
        except (OSError, ValueError, struct.error):
            line.close()  # the client exited before its request was complete
            return None
        # torch is already imported, so the rank starts in milliseconds instead of seconds.
        pid = os.fork()
        if pid == 0:
            line.close()
            self._become_rank(request, files)
            return list(request["arguments"])
        for fd in files:
            os.close(fd)
        # Both this process and the rank set the group, so that it exists before either uses it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._children[pid] = Child(pid, line)
        self._selector.register(line, selectors.EVENT_READ, pid)
        return None

    def _become_rank(self, request: dict[str, Any], files: list[int]) -> None:
        """Turn this forked process into a rank.

        Sets up its standard streams, environment, working directory and process group.
        """
        self._selector.close()
        for each in (self._listener, self._woken, self._wakes):
            each.close()
        for child in self._children.values():
            child.line.close()
        for fd in self._reserved:
            os.close(fd)
        # Move the files via high numbers, because a received file may have a number that is the
        # target of a different file.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4 * FREE) for fd in files]
        for fd in files:
            os.close(fd)
        for fd, number in zip(high, request["files"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        # Processes spawned by multiprocessing look for the script relative to this folder.
        vars(import_module("multiprocessing.process"))["ORIGINAL_DIR"] = request["folder"]
        begin_anew(request["environ"])
        # A new process has random seeds, so reseed NumPy and torch. `random` reseeds itself after a
        # fork. Of torch's generators, only the CPU's starts with a random seed.
        import_module("numpy").random.seed()
        import_module("torch").default_generator.seed()

    def _forward_signals(self, child: Child) -> None:
        """Forward signals to a rank. If the client has closed the socket, kill the rank."""
        try:
            numbers = child.line.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or bytes([signal.SIGKILL]):
            _signal(child.pid, number)
        if not numbers:
            self._selector.unregister(child.line)

    def _reap(self) -> None:
        """Send exited ranks' exit codes to their clients, and kill the processes left behind."""
        for pid, child in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[pid]
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.line)
            with contextlib.suppress(OSError):  # the client may have exited
                child.line.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            child.line.close()
            self._orphans[pid] = time.monotonic() + PATIENCE
        for group, until in list(self._orphans.items()):
            if time.monotonic() > until or not _signal(group, 0):
                _signal(group, signal.SIGKILL)
                del self._orphans[group]


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group. Return whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _receive(line: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = line.recv(length - len(data))
        if not more:
            raise OSError("it ended early")
        data += more
    return data


def main(fd: str, imports: str) -> None:
    """Import modules and serve the clients of the socket `fd`.

    This function also runs the requested module in each forked rank.

    Args:
        fd: Number of the listening socket.
        imports: Modules to import, separated by spaces. MODULE:FUNCTION also calls a function of
            the module.
    """
    # Reserve the low file numbers. A rank receives files with these numbers from its client, so
    # files opened during the imports must not use them.
    reserved = [os.open(os.devnull, os.O_RDONLY) for _ in range(3, FREE)]
    with socket.socket(fileno=int(fd)) as listener:
        # Some packages check for a GPU on import. With this variable, the check does not initialise
        # CUDA, which forked processes could not use. Ranks receive their client's environment.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        for words in imports.split():
            name, _, function = words.partition(":")
            with contextlib.suppress(Exception):  # the script will report the error itself
                module = import_module(name)
                if function:
                    getattr(module, function)()
        # Otherwise a garbage collection in a rank would copy the pages it shares with this process.
        gc.collect()
        gc.freeze()
        arguments = ForkServer(listener, reserved).serve()
    if arguments is not None:
        import_module(arguments[0]).main(arguments[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
