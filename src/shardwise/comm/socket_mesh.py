"""Sends small messages between the ranks of a host, over one Unix socket per pair of ranks.

Messages from a peer arrive complete and in order. If a peer exits or is killed, its socket reports
this immediately. A rank that has received a message can read everything that the sender wrote to
shared memory before sending it, because the two system calls order the memory accesses.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

from shardwise.net import authentication

INLINE = 1 << 15
"""Maximum payload of a message in bytes. A message must fit into a socket's buffer."""

LOOK = 0.2
"""Seconds between two checks whether an awaited rank has exited."""

GREETING = 5.0
"""Seconds within which a new connection must identify its rank."""

_HEADER = struct.Struct("<QBBBxIQQI")
_HELLO = struct.Struct(f"<{authentication.MAC}sI")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group ids at the other end of a socket (SO_PEERCRED)."""
_ROOM = _HEADER.size + INLINE
_ONE_FD = socket.CMSG_SPACE(struct.calcsize("i"))

_living: WeakSet[SocketMesh] = WeakSet()


class MeshMessage(NamedTuple):
    """A message announcing that the sender has reached `stage` in call number `call`.

    `kind`, `dtype`, `numel` and `check` describe the collective. Its buffer starts `offset` bytes
    into `segment`, or is sent as the `payload`. `fd` is a file descriptor sent with the message, or
    -1 if there is none.
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
    """Waits for messages from all socket meshes of this process at once."""

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
            # Treat POLLHUP and POLLERR as readable: `read` finds the end of the stream after the
            # last messages.
            if events & ~select.POLLOUT:
                for message in mesh.read(rank):
                    yield mesh, rank, message

    def follow(self, mesh: SocketMesh, rank: int, fd: int, *, room: bool = False) -> None:
        """Poll a socket for messages and, if `room` is true, for free space in its send buffer."""
        self._owners[fd] = mesh, rank
        self._poll.register(fd, select.POLLIN | (select.POLLOUT if room else 0))

    def add_bell(self, bell: int) -> None:
        """Add the eventfd `bell`, which wakes `look`."""
        self._bells.add(bell)
        self._poll.register(bell, select.POLLIN)

    def leave(self, fd: int) -> None:
        """Stop polling a socket or an eventfd."""
        if self._owners.pop(fd, None) is not None or fd in self._bells:
            self._bells.discard(fd)
            self._poll.unregister(fd)


class SocketMesh:
    """Sockets from this rank to all others on its host. `gone` lists the ranks that have exited."""

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
        """The ranks that this rank is connected to."""
        return list(self._sockets)

    def send(self, rank: int, message: MeshMessage) -> None:
        """Send `message`, or queue it if the socket is full. Drop it if `rank` has exited."""
        # Use the queue even if it is empty, so that messages cannot overtake earlier ones.
        queue = self._unsent[rank]
        queue.append(message)
        if len(queue) == 1:
            self.flush(rank)

    def close(self) -> None:
        """Close every socket. To the other ranks this looks as if this rank had exited."""
        for peer in self._sockets.values():
            self.poll.leave(peer.fileno())
            peer.close()

    def read(self, rank: int) -> Iterator[MeshMessage]:
        """Yield the messages from `rank` that have arrived."""
        peer = self._sockets[rank]
        while True:
            try:
                length, extra, _, _ = peer.recvmsg_into(
                    [self._buffer], _ONE_FD, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer exited before it read all of this rank's messages. The kernel reports
                # that once; after that, the peer's last messages can still be read.
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
        """Send the queued messages to `rank` until the queue is empty or the socket is full."""
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
                pass  # `read` reports the exit, after the last messages of that peer
            queue.popleft()
        # Request POLLOUT only while something is unsent, because a writable socket would wake every
        # poll immediately.
        blocked = bool(queue)
        if blocked != (rank in self._blocked) and rank not in self.gone:
            self._blocked ^= {rank}
            self.poll.follow(self, rank, peer.fileno(), room=blocked)


def listen(name: str, rank: int, size: int, timeout: float) -> socket.socket:
    """Return a socket to which higher ranks connect. All ranks must listen before any connects."""
    # SEQPACKET preserves message boundaries, unlike a stream.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.settimeout(timeout)
        listener.bind(_address(name, rank))  # abstract name: leaves no file behind
        listener.listen(size)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    listener: socket.socket,
    name: str,
    secret: bytes,
    rank: int,
    size: int,
    timeout: float,
    is_lost: Callable[[], bool] = lambda: False,
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, accept all higher ones, and return the sockets by rank.

    Other users of the host can see the names of the sockets. A peer is therefore accepted only if
    the kernel reports that it belongs to this user, and if it proves that it knows `secret`. Raises
    OSError if a connection fails, and ConnectionError if a rank has exited: either its socket shows
    this, or `is_lost` returns true.
    """
    # Connect in one direction only: if both ends connected, a pair would have two sockets.
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
            listener.settimeout(max(0.001, min(LOOK, until - time.monotonic())))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                if is_lost():
                    raise ConnectionResetError("a rank has exited") from None
                if time.monotonic() > until:
                    raise
                continue
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
    """Return the rank that has connected, or None if the peer does not belong to this run."""
    if not _is_ours(peer):
        return None
    peer.settimeout(GREETING)
    try:
        hello = peer.recv(_HELLO.size + 1)
    except OSError:  # the peer has closed the socket or sends nothing
        return None
    if len(hello) != _HELLO.size:
        return None
    their_proof, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(their_proof, proof) else None


def _is_ours(peer: socket.socket) -> bool:
    """Return whether the process at the other end of the socket belongs to this user."""
    sockets = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(sockets)[1]) == os.geteuid()


def _reach(peer: socket.socket, address: str, until: float) -> None:
    """Connect to a listener. While its queue is full, retry until the monotonic time `until`."""
    # If the queue is full, the kernel returns EAGAIN immediately and ignores the socket's timeout.
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
    # A forked DataLoader worker must not hold the sockets open. Otherwise, if this rank were
    # killed, the others would not notice.
    for mesh in list(_living):
        with suppress(OSError):
            mesh.close()


os.register_at_fork(after_in_child=_in_forked_child)
