"""Controls Gloo's sockets: blocks new connections, and closes existing ones.

While a process group exists, Gloo accepts any connection without authentication, and aborts the
process when it runs out of file descriptors. Yet a complete group needs no new connections. Gloo
does not expose its sockets, so we find them among the process's descriptors and attach a socket
filter that drops every packet. Established connections have their own sockets and are not affected.

Gloo closes the connections of a group only when nothing refers to any of its messages any more, and
it does not notice that another host has lost power or its network. So we close them in the same
way.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

_ATTACH_FILTER = 26
"""The socket option SO_ATTACH_FILTER, which Python's socket module does not define."""

_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A BPF program with a single instruction: accept 0 bytes of every packet."""

_OPEN = "/proc/self/fd"
"""Folder that lists this process's open descriptors (Linux)."""

_ADDRESS = re.compile(
    struct.pack("=H", socket.AF_INET)
    + rb"(?=(.{6}))|"
    + struct.pack("=H", socket.AF_INET6)
    + rb"(?=(.{2}).{4}(.{16}))",
    re.DOTALL,
)
"""Matches the kernel's sockaddr structures: the family, the port, and the address.

In an IPv6 address, four bytes of flow information separate the port from the address.
"""

_noted: set[bytes] = set()
"""Ports and addresses at which Gloo listens, in this process and in others."""

_connections: set[int] = set()
"""Inodes of Gloo's connections."""


def note(value: bytes) -> None:
    """Note the addresses in a value of the store, on which Gloo publishes where it listens."""
    _noted.update(b"".join(filter(None, found.groups())) for found in _ADDRESS.finditer(value))


def shut() -> None:
    """Block new connections to Gloo's listening sockets.

    Call it once all ranks of Gloo's groups are connected. No-op if the kernel does not support
    socket filters.
    """
    noted = set(_noted)
    _noted.clear()
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
    for each in _tcp_sockets() if noted else ():
        with each, suppress(OSError):  # neither listening nor connected
            listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            is_own = _packed(each, each.getsockname()) in noted
            if not listens and (is_own or _packed(each, each.getpeername()) in noted):
                _connections.add(os.fstat(each.fileno()).st_ino)
            elif listens and is_own:
                each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _packed(each: socket.socket, name: tuple[str, int]) -> bytes:
    """Return the port and the address of one end of a connection, as in `_noted`."""
    host = socket.inet_pton(each.family, name[0].partition("%")[0])
    return struct.pack("!H", name[1]) + host


def close_gloo() -> None:
    """Close the connections of all Gloo groups of this process.

    Threads that wait for messages are woken, here and on the other ranks.
    """
    for connection in _tcp_sockets() if _connections else ():
        with connection, suppress(OSError):  # the other end has closed it
            if os.fstat(connection.fileno()).st_ino in _connections:
                connection.shutdown(socket.SHUT_RDWR)
    _connections.clear()


def close_connections(addresses: Collection[str]) -> None:
    """Close this process's TCP connections to the hosts at `addresses`.

    Threads that wait for data on them are woken, as if the other end had closed the connection.
    """
    plain = {_plain(address) for address in addresses}
    for connection in _tcp_sockets():
        with connection, suppress(OSError):  # not connected
            if _plain(connection.getpeername()[0]) in plain:
                connection.shutdown(socket.SHUT_RDWR)


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
