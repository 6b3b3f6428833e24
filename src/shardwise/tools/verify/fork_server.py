"""A warm process: it has imported torch and what the script imports, and forks ranks.

    python -m shardwise.tools.verify.fork_server FD MODULES

Importing is most of the time of a short run. Ranks are asked for by rank_client.py over a socket,
and live no longer than who asked for them; the end of the standard input ends all of them. No
thread runs here and no accelerator is touched, so that a forked process may do both.
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

from shardwise.launch import forked
from shardwise.tools.verify.rank_client import FREE

IMPORTED = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.data", "torch.distributed.pipelining"),
    *("shardwise.engine.engine", "shardwise.data.loader", "shardwise.tools.verify.script"),
)
"""What every rank imports; the compiler comes with the first optimizer."""

PATIENCE = 2.0
"""Seconds that what a rank has started may outlive it."""


@dataclass
class Child:
    """A rank that was forked here: its process, which leads a group, and who asked for it."""

    pid: int
    line: socket.socket


class ForkServer:
    """Forks a rank for each that connects to `listener`. `serve` returns in the forked ones."""

    def __init__(self, listener: socket.socket, reserved: list[int]) -> None:
        self._listener = listener
        self._reserved = reserved
        self._children: dict[int, Child] = {}
        self._left: dict[int, float] = {}
        """Groups whose leader has ended, and until when the rest of them may stay."""
        self._woken, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> list[str] | None:
        """Serve until the standard input ends. In a rank: what it is to run; here, at the end,
        None."""
        self._wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for ready in (sys.stdin, self._listener, self._woken):
            self._selector.register(ready, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(PATIENCE if self._left else None):
                if key.fileobj is sys.stdin:
                    self._end()
                    return None
                if key.fileobj is self._listener:
                    if (arguments := self._answer()) is not None:
                        return arguments
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.data in self._children:
                    self._hear(self._children[key.data])
            self._reap()

    def _answer(self) -> list[str] | None:
        """Fork a rank for who connects; in that rank, what it is to run."""
        line, _ = self._listener.accept()
        line.settimeout(PATIENCE)
        try:
            head, files, _, _ = socket.recv_fds(line, 8, FREE)
            asked = json.loads(_received(line, struct.unpack("!Q", head)[0]))
        except (OSError, ValueError, struct.error):
            line.close()  # it has gone
            return None
        pid = os.fork()
        if pid == 0:
            line.close()
            self._become(asked, files)
            return list(asked["arguments"])
        for fd in files:
            os.close(fd)
        with contextlib.suppress(OSError):  # done by the rank itself by now, maybe
            os.setpgid(pid, pid)
        self._children[pid] = Child(pid, line)
        self._selector.register(line, selectors.EVENT_READ, pid)
        return None

    def _become(self, asked: dict[str, Any], files: list[int]) -> None:
        """Be the rank that was asked for: its files, environment, folder, group and signals."""
        self._selector.close()
        for each in (self._listener, self._woken, self._wakes):
            each.close()
        for child in self._children.values():
            child.line.close()
        for fd in self._reserved:
            os.close(fd)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4 * FREE) for fd in files]
        for fd in files:
            os.close(fd)
        for fd, wanted in zip(high, asked["files"], strict=True):
            os.dup2(fd, wanted)
            os.close(fd)
        os.setpgid(0, 0)
        os.chdir(asked["folder"])
        # What multiprocessing spawns finds the script from there.
        vars(import_module("multiprocessing.process"))["ORIGINAL_DIR"] = asked["folder"]
        forked.begin_anew(asked["environ"])
        # Each process that is started draws its own seeds; random does so by itself after a fork.
        # Of torch's generators, the one of the CPU alone begins with a seed that is drawn.
        import_module("numpy").random.seed()
        import_module("torch").default_generator.seed()

    def _hear(self, child: Child) -> None:
        """A signal for a rank; the end of its line ends it."""
        try:
            said = child.line.recv(64)
        except OSError:
            said = b""
        for number in said or bytes([signal.SIGKILL]):
            _signal(child.pid, number)
        if not said:
            self._selector.unregister(child.line)

    def _reap(self) -> None:
        """Say how ranks have ended, and end what they have left behind."""
        for pid, child in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[pid]
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.line)
            with contextlib.suppress(OSError):  # nobody may be there any more
                child.line.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            child.line.close()
            self._left[pid] = time.monotonic() + PATIENCE
        for group, until in list(self._left.items()):
            if time.monotonic() > until or not _signal(group, 0):
                _signal(group, signal.SIGKILL)
                del self._left[group]

    def _end(self) -> None:
        for group in (*self._children, *self._left):
            _signal(group, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _received(line: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        more = line.recv(length - len(found))
        if not more:
            raise OSError("it ended early")
        found += more
    return found


def main(fd: str, modules: str) -> None:
    """Be the warm process, which listens at `fd`; the ranks that it forks return from here when
    they have run."""
    reserved = [os.open(os.devnull, os.O_RDONLY) for _ in range(3, FREE)]
    with socket.socket(fileno=int(fd)) as listener:
        # Packages ask at their import whether there is a GPU; asked in this way, the driver is not
        # started, which no forked process could use then. Ranks get their own environment.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        for name in (*IMPORTED, *modules.split()):
            with contextlib.suppress(Exception):  # the script itself says what is missing or broken
                import_module(name)
        # A collection would copy each page that is shared with the ranks.
        gc.collect()
        gc.freeze()
        arguments = ForkServer(listener, reserved).serve()
    if arguments is not None:
        import_module("shardwise.tools.verify.script").main(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
