"""Stands in for a rank under the launcher, while the rank itself runs in a forked process.

    python rank_client.py FOLDER SERVER MODULE ARGUMENTS ...

This script imports nothing from the package, so it starts in milliseconds. It sends its arguments,
environment and open files to fork_server.py, forwards signals to the rank, and exits with the
rank's exit code. If there is no response from a fork server, it becomes the rank itself.
"""

import json
import os
import signal
import socket
import struct
import sys
from types import FrameType

SERVERS = 2
"""Number of fork servers. Each has its own hash seed, like separately started processes. Successive
ranks are forked from different servers, so that errors that depend on `hash` can appear."""

FREE = 64
"""Fork servers keep file descriptors below this number free for the files that ranks receive."""

COLD = ("-P", "-m")
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def socket_path(folder: str, server: int) -> str:
    """Return the path of the socket of fork server number `server`."""
    return os.path.join(folder, f"server-{server}")


def main(folder: str, first: str, *arguments: str) -> int:
    """Start the rank, wait until it exits, and return its exit code."""
    # A stock script is started by torchrun, which sets RANK.
    rank = int(os.environ.get("SHARDWISE_LAUNCH_RANK") or os.environ.get("RANK") or "0")
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
            # The server may be using a high file number itself. Start the rank without it instead.
            if max(files) >= FREE:
                raise OSError("a file number is too high to be free in a warm process")
            # The kernel limits the name of a socket to 107 bytes, and TMPDIR may be long.
            short = f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"
            connection.connect(socket_path(short, (int(first) + rank) % SERVERS))
            socket.send_fds(connection, [struct.pack("!Q", len(text))], files)
            connection.sendall(text)
        except OSError:
            # No fork server is available. Replace this process with the rank, so that the
            # launcher's pid stays valid.
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
            return 1  # the fork server has exited, and the rank with it
        code_bytes += more
    (code,) = struct.unpack("!i", code_bytes)
    # If a signal killed the rank, die from the same signal, so that the launcher reports it.
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
