"""Moves what elastic islands bring from host to host, in threads beside an agent's event loop.

    who fetches ─▶ rank, number      once both have proved that they know the secret of the run
    who serves  ─▶ size, and so many bytes, and a MAC of them

Each has a connection of its own, since minutes may lie between two of them.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread

from shardwise.net import authentication
from shardwise.net.island_desk import Key

NOTHING = 0
"""The number of what every host has, for whoever wants to know whether it can be reached."""

_REQUEST, _SIZE = struct.Struct("!qq"), struct.Struct("!q")
_NOT_HERE = -1

CONNECT = 10.0
"""Seconds to reach another host."""

STALL = 30.0
"""Seconds without a byte after which a connection is given up."""

AGAIN = 0.5
"""Seconds until what could not be fetched is asked for again."""

CHUNK = 1 << 20

Address = tuple[str, int]


class Server:
    """Gives what `copy` finds to who asks at `listener` and knows `secret`.

    `place` is the address that others are told for `listener`.
    """

    def __init__(
        self,
        listener: socket.socket,
        place: Address,
        secret: bytes,
        copy: Callable[[Key], int | None],
    ) -> None:
        self._listener, self._secret, self._copy = listener, secret, copy
        self._role = _role(place)
        self._bell, self._rung = socket.socketpair()
        self._peers: dict[socket.socket, Thread] = {}
        self._lock = Lock()
        self._thread = Thread(target=self._accept, name="islands-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more."""
        self._bell.close()
        self._thread.join()
        with self._lock:
            serving = dict(self._peers)
        for peer, thread in serving.items():
            with suppress(OSError):  # it has ended meanwhile
                peer.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._rung.close()

    def _accept(self) -> None:
        acceptor = authentication.Acceptor(self._listener, self._secret, self._role, self._rung)
        with acceptor:
            while (peer := acceptor.accept()) is not None:
                thread = Thread(target=self._serve, args=[peer], daemon=True)
                with self._lock:
                    self._peers[peer.socket] = thread
                thread.start()

    def _serve(self, peer: authentication.Connection) -> None:
        """Give one peer what it asks for."""
        # Who has left asks again, if it still wants it.
        with peer, suppress(OSError):
            peer.socket.settimeout(STALL)
            rank, number = _REQUEST.unpack(_message(peer))
            fd = os.memfd_create("nothing") if number == NOTHING else self._copy((rank, number))
            if fd is None:
                peer.send(_SIZE.pack(_NOT_HERE))
            else:
                try:
                    _send_file(peer, fd)
                finally:
                    os.close(fd)
        with self._lock:
            del self._peers[peer.socket]


class Fetches:
    """What is being fetched from other hosts, which know `secret`.

    In the event loop of `selector`, `done` is called with each key and the file that it has come
    to, `failed` with each try that went wrong and why; it is tried until it is cancelled.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: bytes,
        done: Callable[[Key, int], None],
        failed: Callable[[Key, str], None],
    ) -> None:
        self._secret, self._done, self._failed = secret, done, failed
        self._selector = selector
        self._running: dict[Key, _Fetch] = {}
        self._cancelled: list[_Fetch] = []
        self._news: SimpleQueue[tuple[_Fetch, int | str]] = SimpleQueue()
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        selector.register(self._rung, selectors.EVENT_READ, self._hear)

    def begin(self, key: Key, source: Address) -> None:
        """Fetch what is known by `key` from the host that serves at `source`."""
        self.cancel(key)
        self._running[key] = _Fetch(key, source, self._secret, self._tell)
        self._running[key].start()

    def cancel(self, key: Key) -> None:
        """Fetch it no longer, if it is under way."""
        if (fetch := self._running.pop(key, None)) is not None:
            fetch.cancel()
            self._cancelled = [each for each in self._cancelled if each.is_alive()]
            self._cancelled.append(fetch)

    def close(self) -> None:
        """Fetch nothing any more."""
        for key in list(self._running):
            self.cancel(key)
        for fetch in self._cancelled:
            fetch.join()
        self._selector.unregister(self._rung)
        self._take()
        self._rung.close()
        self._bell.close()

    def _tell(self, fetch: _Fetch, what: int | str) -> None:
        """Say from a thread how a try ended."""
        self._news.put((fetch, what))
        with suppress(OSError):  # nobody listens any more, or a ring is on its way already
            self._bell.send(b"\0", socket.MSG_DONTWAIT)

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            self._rung.recv(CHUNK)
        self._take()

    def _take(self) -> None:
        while not self._news.empty():
            fetch, what = self._news.get()
            if isinstance(what, int):
                fetch.join()  # it has nothing more to say
            is_wanted = self._running.get(fetch.key) is fetch
            if isinstance(what, str):
                if is_wanted:
                    self._failed(fetch.key, what)
            elif is_wanted:
                del self._running[fetch.key]
                self._done(fetch.key, what)
            else:
                os.close(what)


class _Fetch(Thread):
    """Fetches one file; `tell` is called with its descriptor, and with each reason why not."""

    def __init__(
        self,
        key: Key,
        source: Address,
        secret: bytes,
        tell: Callable[[_Fetch, int | str], None],
    ) -> None:
        super().__init__(name="islands-fetch", daemon=True)
        self.key = key
        self._source, self._secret, self._tell = source, secret, tell
        self._cancelled = Event()
        self._lock = Lock()
        self._peer: socket.socket | None = None

    def cancel(self) -> None:
        """Give up, soon."""
        self._cancelled.set()
        with self._lock:
            if self._peer is not None:
                with suppress(OSError):  # it is not connected yet, or no more
                    self._peer.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        while not self._cancelled.is_set():
            try:
                found = self._fetched()
            except OSError as error:
                self._tell(self, error.strerror or str(error))
                self._cancelled.wait(AGAIN)
            else:
                self._tell(self, found)
                return

    def _fetched(self) -> int:
        """The descriptor of the file. Raises OSError."""
        family, kind, protocol, _, place = socket.getaddrinfo(
            *self._source, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as peer:
            peer.settimeout(CONNECT)
            with self._lock:
                self._peer = peer
            try:
                # Only now can a cancel be seen by the socket: one that came before is seen here.
                if self._cancelled.is_set():
                    raise ConnectionError("it is fetched no longer")
                peer.connect(place)
                return self._read(peer)
            finally:
                with self._lock:
                    self._peer = None

    def _read(self, peer: socket.socket) -> int:
        until = time.monotonic() + CONNECT
        proven = authentication.prove(peer, self._secret, _role(self._source), until)
        peer.settimeout(STALL)
        proven.send(_REQUEST.pack(*self.key))
        (size,) = _SIZE.unpack(_message(proven))
        if size == _NOT_HERE:
            raise ConnectionError(f"{self.key} is not there")
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        try:
            _copy(proven, fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _role(place: Address) -> bytes:
    """The role of who serves at `place`; see authentication.py."""
    return f"islands {place[0]} {place[1]}".encode()


def _message(peer: authentication.Connection) -> bytes:
    """The next message of `peer`. Raises OSError where none comes that it has sealed."""
    try:
        message = peer.receive()
    except authentication.Forged as error:
        raise ConnectionError(str(error)) from None
    if message is None:
        raise ConnectionError("the connection ended")
    return message


def _send_file(peer: authentication.Connection, fd: int) -> None:
    """Send the size of a file, its bytes, and their MAC. Raises OSError."""
    size, place = os.fstat(fd).st_size, 0
    peer.send(_SIZE.pack(size))
    sum_of_all, buffer = peer.seals.sends_bulk(), memoryview(bytearray(min(size, CHUNK)))
    while place < size:
        # Descriptors of one file share their offset, and several hosts may fetch it at once.
        count = os.preadv(fd, [buffer], place)
        if not count:
            raise ConnectionError(f"the file has ended at byte {place} of {size}")
        place += count
        # The kernel sends the chunk while it is added to the MAC.
        peer.socket.sendall(buffer[:count])
        sum_of_all.update(buffer[:count])
    peer.socket.sendall(sum_of_all.digest())


def _copy(peer: authentication.Connection, fd: int, size: int) -> None:
    """Write `size` bytes that come from `peer` into a file. Raises OSError, also for bytes that
    the other end has not sent."""
    buffer = memoryview(bytearray(min(size, CHUNK)))
    sum_of_all = peer.seals.receives_bulk()
    while size:
        came = peer.socket.recv_into(buffer[: min(size, CHUNK)])
        if not came:
            raise ConnectionError(f"the connection ended {size} bytes before what was to come")
        size -= came
        sum_of_all.update(buffer[:came])
        left = buffer[:came]
        while left:
            left = left[os.write(fd, left) :]
    seal = _exactly(peer.socket, authentication.MAC)
    if not hmac.compare_digest(seal, sum_of_all.digest()):
        raise ConnectionError("what came was changed on its way")


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data
