"""The socket on which rank 0 will meet the others."""

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
