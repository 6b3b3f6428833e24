"""The sockets on which rank 0 will meet the others: for us, and for who calls torch itself."""

import errno
import socket

from shardwise.errors import LaunchError


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `port`, or with 0 on one that the kernel chooses.

    Rank 0 inherits it, so no other process can take the port in between. Raises LaunchError.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"Port {port} on {address} is in use by another process. "
                "Leave --port out, and a free one is taken."
            ) from None
        raise LaunchError(
            f"Port {port} on {address} cannot be listened on: {error.strerror}. "
            "Leave --port out, and a free one is taken."
        ) from None


def reserve(address: str) -> socket.socket:
    """A socket on a port that the kernel chooses, which is kept for whom MASTER_PORT is told.

    It does not listen, so that a script on this host can, by torch's own init_process_group.
    Raises LaunchError.
    """
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, 0))
    except OSError as error:
        made.close()
        raise LaunchError(f"No port on {address} can be had: {error.strerror}.") from None
    return made
