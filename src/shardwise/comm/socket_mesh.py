"""Carries small messages between the ranks of one host, over a Unix socket for each pair.

Messages of one peer arrive whole and in order. A peer that ends, however it does, is seen at once
as the end of its socket. What a rank wrote before it sent a message can be read by who received it:
the two system calls order the memory between them.
"""

from __future__ import annotations

import array
import hmac
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

from shardwise.net import authentication

INLINE = 1 << 15
"""Bytes that a message may carry itself; one must fit into a socket's buffer."""

GREETING = 5.0
"""Seconds that a process of this user has to say which rank it is."""

_HEADER = struct.Struct("<QBBBxIQQI")
_HELLO = struct.Struct(f"<{authentication.MAC}sI")
_CREDENTIALS = struct.Struct("3i")
"""Of who is at the other end of a socket: process, user and group."""
_ROOM = _HEADER.size + INLINE
_ONE_FD = socket.CMSG_SPACE(struct.calcsize("i"))

_living: WeakSet[SocketMesh] = WeakSet()


class MeshMessage(NamedTuple):
    """A message of one rank to another: its `stage` in call number `call`.

    `kind`, `dtype`, `numel` and `check` say which collective the call is; `segment` and `offset`
    where its buffer lies, or `payload` is the buffer. `fd` is a descriptor on its way.
    """

    call: int
    stage: int
    kind: int = 0
    dtype: int = 0
    segment: int = 0
    offset: int = 0
    numel: int = 0
    check: int = 0
    payload: bytes = b""
    fd: int = -1


class MeshPoll:
    """Waits for messages of all meshes of this process together."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._owners: dict[int, tuple[SocketMesh, int]] = {}
        self._bells: set[int] = set()

    def look(self, patience: float = 0.0) -> Iterator[tuple[SocketMesh, int, MeshMessage]]:
        """The messages that have come; waits up to `patience` seconds for the first."""
        for fd, events in self._poll.poll(patience * 1000 if patience > 0 else 0):
            if fd in self._bells:
                os.eventfd_read(fd)
                continue
            mesh, rank = self._owners[fd]
            if events & select.POLLOUT:
                mesh.flush(rank)
            if events & ~select.POLLOUT:
                for message in mesh.read(rank):
                    yield mesh, rank, message

    def follow(self, mesh: SocketMesh, rank: int, fd: int, *, room: bool = False) -> None:
        """Watch a socket; with `room` also for room to send."""
        self._owners[fd] = mesh, rank
        self._poll.register(fd, select.POLLIN | (select.POLLOUT if room else 0))

    def hear(self, bell: int) -> None:
        """Let an eventfd end the waiting of `look`; nothing is read from it."""
        self._bells.add(bell)
        self._poll.register(bell, select.POLLIN)

    def leave(self, fd: int) -> None:
        """Watch a socket or an eventfd no longer."""
        if self._owners.pop(fd, None) is not None or fd in self._bells:
            self._bells.discard(fd)
            self._poll.unregister(fd)


class SocketMesh:
    """Sockets from this rank to all others of the host. `gone` are the peers whose end was seen."""

    def __init__(self, peers: dict[int, socket.socket], poll: MeshPoll) -> None:
        self._sockets = peers
        self._unsent: dict[int, deque[MeshMessage]] = {rank: deque() for rank in peers}
        self._buffer = memoryview(bytearray(_ROOM))
        self._blocked: set[int] = set()
        self.poll = poll
        self.gone: set[int] = set()
        for rank, peer in peers.items():
            peer.setblocking(False)
            poll.follow(self, rank, peer.fileno())
        _living.add(self)

    @property
    def peers(self) -> list[int]:
        """The ranks at the other ends."""
        return list(self._sockets)

    def send(self, rank: int, message: MeshMessage) -> None:
        """Send, now or as soon as there is room; a message to a peer that is gone is dropped."""
        queue = self._unsent[rank]
        queue.append(message)
        if len(queue) == 1:
            self.flush(rank)

    def close(self) -> None:
        """Close every socket, which the peers see."""
        for peer in self._sockets.values():
            self.poll.leave(peer.fileno())
            peer.close()

    def read(self, rank: int) -> Iterator[MeshMessage]:
        """The messages of `rank` that have come."""
        peer = self._sockets[rank]
        while True:
            try:
                length, extra, _, _ = peer.recvmsg_into(
                    [self._buffer], _ONE_FD, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left messages of ours unread; its own are still to be read
            if not length:
                self.poll.leave(peer.fileno())
                self.gone.add(rank)
                return
            fields = _HEADER.unpack_from(self._buffer)
            payload = bytes(self._buffer[_HEADER.size : length])
            yield MeshMessage._make([*fields, payload, _descriptor(extra)])

    def flush(self, rank: int) -> None:
        """Send to `rank` what there is room for."""
        peer, queue = self._sockets[rank], self._unsent[rank]
        while queue:
            message = queue[0]
            data = _HEADER.pack(*message[:8]) + message.payload
            try:
                if message.fd >= 0:
                    socket.send_fds(peer, [data], [message.fd])
                else:
                    peer.send(data)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                pass  # its end is found by reading, after all that it said before
            queue.popleft()
        blocked = bool(queue)
        if blocked != (rank in self._blocked) and rank not in self.gone:
            self._blocked ^= {rank}
            self.poll.follow(self, rank, peer.fileno(), room=blocked)


def _descriptor(extra: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", data[: array.array("i").itemsize])[0]
    return -1


def listen(name: str, rank: int, size: int, timeout: float) -> socket.socket:
    """Where the higher ranks will reach this one; all ranks must be here before any connects."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.settimeout(timeout)
        listener.bind(_address(name, rank))  # abstract: no file that could be left behind
        listener.listen(size)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    listener: socket.socket, name: str, secret: bytes, rank: int, size: int, timeout: float
) -> dict[int, socket.socket]:
    """Reach every lower rank and be reached by every higher one; by rank. Raises OSError.

    Names of sockets can be seen by other users of the host: whoever connects must be this user, as
    the kernel tells, and of the run that has `secret`.
    """
    found: dict[int, socket.socket] = {}
    word, until = authentication.mac(secret, b"mesh", name.encode()), time.monotonic() + timeout
    try:
        for lower in range(rank):
            peer = found[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(timeout)
            _reach(peer, _address(name, lower), until)
            if not _is_ours(peer):
                raise PermissionError(f"another user listens in the place of rank {lower}")
            peer.send(_HELLO.pack(word, rank))
        while len(found) < size - 1:
            listener.settimeout(max(0.001, until - time.monotonic()))
            peer, _ = listener.accept()
            higher = _greeted(peer, word)
            if higher is not None and rank < higher < size:
                found[higher] = peer
            else:
                peer.close()
    except BaseException:
        for peer in found.values():
            peer.close()
        raise
    return dict(sorted(found.items()))


def _greeted(peer: socket.socket, word: bytes) -> int | None:
    """The rank that has connected; None for a stranger."""
    if not _is_ours(peer):
        return None
    peer.settimeout(GREETING)
    try:
        hello = peer.recv(_HELLO.size + 1)
    except OSError:  # it has left, or has nothing to say
        return None
    if len(hello) != _HELLO.size:
        return None
    given, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(given, word) else None


def _is_ours(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1]) == os.geteuid()


def _reach(peer: socket.socket, address: str, until: float) -> None:
    """Connect to a listener. Where its queue is full, of ranks or of strangers, the kernel says
    EAGAIN at once whatever the time-out of the socket: then try again until `until`."""
    pause = 0.001
    while True:
        try:
            peer.connect(address)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _address(name: str, rank: int) -> str:
    return f"\0shardwise-{name}-{rank}"


def _in_forked_child() -> None:
    """A forked DataLoader worker must not hold our sockets open: were this rank killed, the
    others would see no end of it."""
    for mesh in list(_living):
        with suppress(OSError):
            mesh.close()


os.register_at_fork(after_in_child=_in_forked_child)
