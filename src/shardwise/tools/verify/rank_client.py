"""Stands for a rank in the launcher's eyes, while a process forked from a warm one is that rank:

    python rank_client.py FOLDER SEAT ARGUMENTS ...

A script of its own, which imports nothing of the package and so starts in milliseconds. It hands
over its arguments, environment and open files (fork_server.py), passes signals on, and ends as the
rank ends. Where no warm process answers, it becomes the rank itself.
"""

import json
import os
import signal
import socket
import struct
import sys
from types import FrameType

SEATS = 2
"""Warm processes of a verification. Each has its own seed of `hash`, as ranks that are started one
by one have: rank 0 is forked from another one than rank 1 is, and than the reference."""

FREE = 64
"""File numbers below it are kept free in warm processes, for those that a rank inherits."""

COLD = ("-P", "-m", "shardwise.tools.verify.script")
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def socket_path(folder: str, seat: int) -> str:
    """Where the warm process of a seat listens."""
    return os.path.join(folder, f"seat-{seat}")


def main(folder: str, first: str, *arguments: str) -> int:
    """Be the rank until it ends; returns its exit code."""
    rank = int(os.environ.get("SHARDWISE_LAUNCH_RANK", "0"))
    path = socket_path(folder, (int(first) + rank) % SEATS)
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    asked = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
    }
    text = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as line:
        try:
            if max(files) >= FREE:
                raise OSError("file numbers that a warm process may have itself")
            line.connect(path)
            socket.send_fds(line, [struct.pack("!Q", len(text))], files)
            line.sendall(text)
        except OSError:
            os.execv(sys.executable, (sys.executable, *COLD, *arguments))
        return _follow(line)


def _follow(line: socket.socket) -> int:
    """Pass signals on, and wait for the end."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        line.send(bytes([number]))

    for each in PASSED:
        signal.signal(each, pass_on)
    said = b""
    while len(said) < 4:
        more = line.recv(4 - len(said))
        if not more:
            return 1  # the warm process is gone, and the rank with it
        said += more
    (code,) = struct.unpack("!i", said)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return int(code)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
