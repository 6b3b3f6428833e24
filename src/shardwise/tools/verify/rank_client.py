"""Represents a rank to the launcher, while a process forked from a warm one is that rank.

    python rank_client.py FOLDER SERVER ARGUMENTS ...

This script imports nothing of the package, so it starts in milliseconds. It sends its arguments,
environment and open files to fork_server.py, forwards signals, and ends with the rank's exit code.
If no warm process answers, it becomes the rank itself.
"""

import json
import os
import signal
import socket
import struct
import sys
from types import FrameType

SERVERS = 2
"""Number of warm processes of a verification. Each has its own seed of `hash`, as ranks that are
started one by one do: rank 0 is forked from a different one than rank 1 and the reference."""

FREE = 64
"""Warm processes keep file numbers below this free, for files that a rank inherits."""

COLD = ("-P", "-m", "shardwise.tools.verify.script")
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def socket_path(folder: str, server: int) -> str:
    """Return the path of the socket of the warm process with number `server`."""
    return os.path.join(folder, f"server-{server}")


def main(folder: str, first: str, *arguments: str) -> int:
    """Act as the rank until it ends. Return its exit code."""
    rank = int(os.environ.get("SHARDWISE_LAUNCH_RANK", "0"))
    path = socket_path(folder, (int(first) + rank) % SERVERS)
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)]
    request = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
    }
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            # The number might be in use in the warm process. Start the rank the slow way instead.
            if max(files) >= FREE:
                raise OSError("a file number is too high to be free in a warm process")
            connection.connect(path)
            socket.send_fds(connection, [struct.pack("!Q", len(text))], files)
            connection.sendall(text)
        except OSError:
            # No warm process: replace this one by the rank, so that the launcher's pid stays valid.
            os.execv(sys.executable, (sys.executable, *COLD, *arguments))
        return _follow(connection)


def _follow(connection: socket.socket) -> int:
    """Forward signals to the rank, and wait for its exit code."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        connection.send(bytes([number]))

    for each in PASSED:
        signal.signal(each, pass_on)
    code_bytes = b""
    while len(code_bytes) < 4:
        more = connection.recv(4 - len(code_bytes))
        if not more:
            return 1  # the warm process has ended, and the rank with it
        code_bytes += more
    (code,) = struct.unpack("!i", code_bytes)
    # A rank killed by a signal: die of the same signal, so that the launcher reports it.
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
