"""Closes Gloo's listening sockets to everybody, once its ranks are connected.

Gloo accepts whoever connects as long as a group lives, asks nobody who it is, and ends the process
once that is more than it may open files. But nobody has to come once a group is made. Its sockets
are out of our reach, but not the kernel's: a filter on one drops what comes for it; connections
that there are already go on.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER, which Python has no name for."""

_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction: accept 0 bytes of every packet."""

_OPEN = "/proc/self/fd"
"""The descriptors of this process, by number (Linux)."""

_noted: deque[bytes] = deque(maxlen=64)


def note(value: bytes) -> None:
    """Remember a value that was put on the store: Gloo's say where it listens."""
    _noted.append(value)


def shut() -> None:
    """Let the sockets that Gloo listens on hear nobody any more.

    Call it when all ranks of its groups are connected. Where the kernel has no filters they stay
    open.
    """
    noted = list(_noted)
    _noted.clear()
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
    for listener in _listening() if noted else ():
        with listener, suppress(OSError):
            if any(_is_in(value, listener) for value in noted):
                listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _listening() -> Iterator[socket.socket]:
    """The listening TCP sockets of this process, each by a descriptor of its own."""
    # Some sandboxes have no /proc: there the sockets stay open, as on other systems.
    for fd in os.listdir(_OPEN) if os.path.isdir(_OPEN) else ():
        with suppress(OSError):  # it was closed meanwhile, or is no socket
            if not os.readlink(f"{_OPEN}/{fd}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(fd)))
            is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found
            else:
                found.close()


def _is_in(value: bytes, listener: socket.socket) -> bool:
    """Whether `value` holds the address of this listener, as the kernel's own structure."""
    host, port = listener.getsockname()[:2]
    packed = socket.inet_pton(listener.family, host.partition("%")[0])
    gap = b"" if listener.family == socket.AF_INET else bytes(4)  # IPv6 has the flow between
    return struct.pack("!H", port) + gap + packed in value
