"""Small messages between the ranks of one host, over a Unix socket for each pair.

Messages of one peer arrive whole and in order. If a peer ends, even by a kill, its socket reports
that at once. A rank that has received a message can read everything that the sender wrote to
shared memory before it: the two system calls order the memory accesses.
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
"""Largest payload of a message in bytes. A message must fit into a socket's buffer."""

GREETING = 5.0
"""Seconds within which a new connection must say which rank it is."""

_HEADER = struct.Struct("<QBBBxIQQI")
_HELLO = struct.Struct(f"<{authentication.MAC}sI")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a socket (SO_PEERCRED)."""
_ROOM = _HEADER.size + INLINE
_ONE_FD = socket.CMSG_SPACE(struct.calcsize("i"))

_living: WeakSet[SocketMesh] = WeakSet()


class MeshMessage(NamedTuple):
    """A message from one rank to another: its `stage` in call number `call`.

    `kind`, `dtype`, `numel` and `check` describe the collective. Its buffer is at `offset` bytes in
    `segment`, or the buffer is the `payload`. `fd` is a descriptor that the message carries.
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
        """Yield messages that have arrived, waiting up to `patience` seconds for the first."""
        for fd, events in self._poll.poll(patience * 1000 if patience > 0 else 0):
            if fd in self._bells:
                os.eventfd_read(fd)
                continue
            mesh, rank = self._owners[fd]
            if events & select.POLLOUT:
                mesh.flush(rank)
            # POLLHUP and POLLERR count as readable: `read` finds the end after the last messages.
            if events & ~select.POLLOUT:
                for message in mesh.read(rank):
                    yield mesh, rank, message

    def follow(self, mesh: SocketMesh, rank: int, fd: int, *, room: bool = False) -> None:
        """Watch a socket for messages. With `room`, also for free space in its send buffer."""
        self._owners[fd] = mesh, rank
        self._poll.register(fd, select.POLLIN | (select.POLLOUT if room else 0))

    def add_bell(self, bell: int) -> None:
        """Watch an eventfd, which wakes `look`."""
        self._bells.add(bell)
        self._poll.register(bell, select.POLLIN)

    def leave(self, fd: int) -> None:
        """Stop watching a socket or an eventfd."""
        if self._owners.pop(fd, None) is not None or fd in self._bells:
            self._bells.discard(fd)
            self._poll.unregister(fd)


class SocketMesh:
    """Sockets from this rank to all others of its host. `gone` are the peers that have ended."""

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
        """Ranks at the other ends."""
        return list(self._sockets)

    def send(self, rank: int, message: MeshMessage) -> None:
        """Send a message, now or when there is room. It is dropped if the peer has ended."""
        # Through the queue even if it is empty: messages must not overtake earlier ones.
        queue = self._unsent[rank]
        queue.append(message)
        if len(queue) == 1:
            self.flush(rank)

    def close(self) -> None:
        """Close every socket. The peers see this as the end of this rank."""
        for peer in self._sockets.values():
            self.poll.leave(peer.fileno())
            peer.close()

    def read(self, rank: int) -> Iterator[MeshMessage]:
        """Yield the messages of `rank` that have arrived."""
        peer = self._sockets[rank]
        while True:
            try:
                length, extra, _, _ = peer.recvmsg_into(
                    [self._buffer], _ONE_FD, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer ended before it read all of this rank's messages. The kernel reports
                # that once; after that, the peer's own last messages can still be read.
                continue
            if not length:
                self.poll.leave(peer.fileno())
                self.gone.add(rank)
                return
            fields = _HEADER.unpack_from(self._buffer)
            payload = bytes(self._buffer[_HEADER.size : length])
            fd = -1
            for level, kind, data in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fd = array.array("i", data[: array.array("i").itemsize])[0]
            yield MeshMessage._make([*fields, payload, fd])

    def flush(self, rank: int) -> None:
        """Send the queued messages to `rank` until its socket is full."""
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
                pass  # `read` reports the end, after the last messages of that peer
            queue.popleft()
        # Ask poll for POLLOUT only while something is unsent: a writable socket would wake every
        # poll at once.
        blocked = bool(queue)
        if blocked != (rank in self._blocked) and rank not in self.gone:
            self._blocked ^= {rank}
            self.poll.follow(self, rank, peer.fileno(), room=blocked)


def listen(name: str, rank: int, size: int, timeout: float) -> socket.socket:
    """Return the socket that higher ranks connect to. All ranks listen before any connects."""
    # SEQPACKET keeps the borders of messages, as a stream would not.
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
    """Connect to every lower rank, accept every higher one, and return the sockets by rank.

    Other users of the host can see the names of the sockets. So a peer must belong to this user,
    as the kernel reports it, and must know `secret`. Raises OSError.
    """
    # One direction per pair: if both ends connected, a pair would have two sockets.
    sockets: dict[int, socket.socket] = {}
    proof, until = authentication.mac(secret, b"mesh", name.encode()), time.monotonic() + timeout
    try:
        for lower in range(rank):
            peer = sockets[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(timeout)
            _reach(peer, _address(name, lower), until)
            if not _is_ours(peer):
                raise PermissionError(f"another user listens in the place of rank {lower}")
            peer.send(_HELLO.pack(proof, rank))
        while len(sockets) < size - 1:
            listener.settimeout(max(0.001, until - time.monotonic()))
            peer, _ = listener.accept()
            higher = _receive_greeting(peer, proof)
            if higher is not None and rank < higher < size:
                sockets[higher] = peer
            else:
                peer.close()
    except BaseException:
        for peer in sockets.values():
            peer.close()
        raise
    return dict(sorted(sockets.items()))


def _receive_greeting(peer: socket.socket, proof: bytes) -> int | None:
    """Return the rank that has connected; None if it is not of this run."""
    if not _is_ours(peer):
        return None
    peer.settimeout(GREETING)
    try:
        hello = peer.recv(_HELLO.size + 1)
    except OSError:  # it has closed the socket, or sends nothing
        return None
    if len(hello) != _HELLO.size:
        return None
    their_proof, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(their_proof, proof) else None


def _is_ours(peer: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    sockets = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(sockets)[1]) == os.geteuid()


def _reach(peer: socket.socket, address: str, until: float) -> None:
    """Connect to a listener. While its queue is full, try again until the time `until`."""
    # If the queue is full, the kernel returns EAGAIN at once and ignores the socket's timeout.
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
    # A forked DataLoader worker must not hold the sockets open: if this rank were killed, the
    # others would not see the end of its sockets.
    for mesh in list(_living):
        with suppress(OSError):
            mesh.close()


os.register_at_fork(after_in_child=_in_forked_child)
