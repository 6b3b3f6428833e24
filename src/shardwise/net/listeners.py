"""Controls Gloo's sockets: blocks new connections, and closes connections to lost hosts.

While a process group exists, Gloo accepts any connection without authentication, and aborts the
process when it runs out of file descriptors. Yet a complete group needs no new connections. Gloo
does not expose its sockets, so we find them among the process's descriptors and attach a socket
filter that drops every packet. Established connections have their own sockets and are not affected.

Nor does Gloo notice that another host has lost power or its network. We close its connections to
such a host in the same way.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import struct
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress

_ATTACH_FILTER = 26
"""The socket option SO_ATTACH_FILTER, which Python's socket module does not define."""

_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A BPF program with a single instruction: accept 0 bytes of every packet."""

_OPEN = "/proc/self/fd"
"""Folder that lists this process's open descriptors (Linux)."""

_noted: deque[bytes] = deque(maxlen=64)


def note(value: bytes) -> None:
    """Store a value that was set on the store, on which Gloo publishes its listening addresses."""
    _noted.append(value)


def shut() -> None:
    """Block new connections to Gloo's listening sockets.

    Call it once all ranks of Gloo's groups are connected. No-op if the kernel does not support
    socket filters.
    """
    noted = list(_noted)
    _noted.clear()
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
    for listener in _tcp_sockets() if noted else ():
        with listener, suppress(OSError):
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            host, port = listener.getsockname()[:2]
            packed = socket.inet_pton(listener.family, host.partition("%")[0])
            # Gloo publishes its addresses as the kernel's sockaddr structures. In an IPv6 address,
            # four bytes of flow information separate the port from the address.
            gap = b"" if listener.family == socket.AF_INET else bytes(4)
            address = struct.pack("!H", port) + gap + packed
            if any(address in value for value in noted):
                listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def close_connections(addresses: Collection[str], *, only_gloo: bool = False) -> None:
    """Close this process's TCP connections to the hosts at `addresses`.

    Threads that wait for data on them are woken, as if the other end had closed the connection.

    Args:
        addresses: The hosts' addresses.
        only_gloo: True to keep the connections that Python has opened, such as those to status
            servers. The others are those of Gloo, unless the script uses further libraries in C++.
    """
    plain = {_plain(address) for address in addresses}
    kept = _python_sockets() if only_gloo else set()
    for connection in _tcp_sockets():
        with connection, suppress(OSError):  # not connected
            number = os.fstat(connection.fileno()).st_ino
            if _plain(connection.getpeername()[0]) in plain and number not in kept:
                connection.shutdown(socket.SHUT_RDWR)


def _python_sockets() -> set[int]:
    """Return the inodes of all open Python sockets."""
    found = set()
    for each in gc.get_objects():
        # Not isinstance, which would look into lazy modules and dead proxies.
        if issubclass(type(each), socket.socket):
            with suppress(OSError):  # closed, perhaps just now by another thread
                found.add(os.fstat(each.fileno()).st_ino)
    return found


def _plain(address: str) -> str:
    """Return `address` without its IPv6 scope, which is a name of this host's interface."""
    return address.partition("%")[0].removeprefix("::ffff:")


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket in this process. The caller closes it."""
    # Without /proc, as in some sandboxes and on other systems, the sockets stay open.
    for fd in os.listdir(_OPEN) if os.path.isdir(_OPEN) else ():
        with suppress(OSError):  # closed in the meantime, or not a socket
            if not os.readlink(f"{_OPEN}/{fd}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(fd)))
            is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and found.type == socket.SOCK_STREAM:
                yield found
            else:
                found.close()
