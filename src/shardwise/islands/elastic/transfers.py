"""Copies elastic islands' files between hosts, in threads of the agent.

    client ─▶ rank, number                       after both ends have authenticated
    server ─▶ size, content and its MAC

Each fetch opens its own connection, because minutes may pass between two fetches.
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

from shardwise.islands.elastic.broker import Key
from shardwise.net import authentication, rpc

NOTHING = 0
"""The number of an empty file that every host serves, to test whether the host can be reached."""

_REQUEST, _SIZE = struct.Struct("!qq"), struct.Struct("!q")
_NOT_HERE = -1

CONNECT = 10.0
"""Seconds to wait for a connection to another host."""

STALL = 30.0
"""A connection fails after this many seconds without data."""

AGAIN = 0.5
"""Seconds to wait between two attempts to fetch a file."""

CHUNK = 1 << 20

Address = tuple[str, int]


def serve(
    listener: socket.socket, place: Address, secret: bytes, copy: Callable[[Key], int | None]
) -> rpc.Server:
    """Serve files to peers that know `secret`. The caller closes the server.

    Args:
        listener: The listening socket.
        place: The address at which other hosts reach `listener`.
        secret: The run's secret.
        copy: Returns a new descriptor for the file with the given key, or None if it is missing.
    """

    def give(peer: rpc.Connection) -> None:
        """Send a peer the file that it requests. If the connection fails, the peer retries."""
        peer.socket.settimeout(STALL)
        rank, number = _REQUEST.unpack(_message(peer))
        # Use a duplicate of the broker's descriptor, because the broker may drop the file in the
        # meantime.
        fd = os.memfd_create("nothing") if number == NOTHING else copy((rank, number))
        if fd is None:
            peer.send(_SIZE.pack(_NOT_HERE))
            return
        try:
            _send_file(peer, fd)
        finally:
            os.close(fd)

    return rpc.Server(listener, secret, _role(place), give, name="islands-serve")


class Fetches:
    """Fetches files from other hosts, retrying until they arrive or are cancelled.

    Args:
        selector: The event loop that runs the callbacks.
        secret: The run's secret.
        done: Called with the key and the descriptor of each file that has arrived.
        failed: Called with the file's key and the reason after each failed attempt.
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
        # Threads put results into this queue, and wake the event loop through a pair of sockets.
        self._results: SimpleQueue[tuple[_Fetch, int | str]] = SimpleQueue()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        selector.register(self._wake_receiver, selectors.EVENT_READ, self._on_wake)

    def begin(self, key: Key, source: Address) -> None:
        """Start fetching the file `key` from the file server at `source`."""
        self.cancel(key)
        self._running[key] = _Fetch(key, source, self._secret, self._report)
        self._running[key].start()

    def cancel(self, key: Key) -> None:
        """Cancel the fetch of the file `key`, if one is running."""
        if (fetch := self._running.pop(key, None)) is not None:
            fetch.cancel()
            self._cancelled = [each for each in self._cancelled if each.is_alive()]
            self._cancelled.append(fetch)

    def close(self) -> None:
        """Cancel all fetches, and wait for their threads."""
        for key in list(self._running):
            self.cancel(key)
        for fetch in self._cancelled:
            fetch.join()
        self._selector.unregister(self._wake_receiver)
        self._handle_results()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _report(self, fetch: _Fetch, what: int | str) -> None:
        """Report the result of an attempt. Called in the fetch's thread."""
        self._results.put((fetch, what))
        with suppress(OSError):  # closed, or full and the loop will wake up anyway
            self._wake_sender.send(b"\0", socket.MSG_DONTWAIT)

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_receiver.recv(CHUNK)
        self._handle_results()

    def _handle_results(self) -> None:
        while not self._results.empty():
            fetch, what = self._results.get()
            if isinstance(what, int):
                fetch.join()  # the thread exits after this result
            # The fetch may have been cancelled, or replaced with a later fetch of the same file.
            is_wanted = self._running.get(fetch.key) is fetch
            if isinstance(what, str):
                if is_wanted:
                    self._failed(fetch.key, what)
            elif is_wanted:
                del self._running[fetch.key]
                self._done(fetch.key, what)
            else:
                os.close(what)  # cancelled while it arrived


class _Fetch(Thread):
    """Fetches a single file in its own thread.

    `tell` is called with the reason after each failure, and finally with the file's descriptor.
    """

    def __init__(
        self,
        key: Key,
        source: Address,
        secret: bytes,
        tell: Callable[[_Fetch, int | str], None],
    ) -> None:
        super().__init__(name="islands-fetch", daemon=True)
        self.key = key
        self._source, self._secret, self._report = source, secret, tell
        self._cancelled = Event()
        self._lock = Lock()
        self._peer: socket.socket | None = None

    def cancel(self) -> None:
        """Stop as soon as possible, even in the middle of a transfer."""
        self._cancelled.set()
        with self._lock:
            if self._peer is not None:
                with suppress(OSError):  # not connected yet, or closed
                    self._peer.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        while not self._cancelled.is_set():
            try:
                fd = self._fetch()
            except OSError as error:
                self._report(self, error.strerror or str(error))
                self._cancelled.wait(AGAIN)
            else:
                self._report(self, fd)
                return

    def _fetch(self) -> int:
        """Fetch the file and return its descriptor. Raises OSError if the attempt fails."""
        family, kind, protocol, _, place = socket.getaddrinfo(
            *self._source, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as peer:
            peer.settimeout(CONNECT)
            with self._lock:
                self._peer = peer
            try:
                # From here on, `cancel` shuts down the socket. Check for an earlier cancel.
                if self._cancelled.is_set():
                    raise ConnectionError("the fetch was cancelled")
                peer.connect(place)
                return self._read(peer)
            finally:
                with self._lock:
                    self._peer = None

    def _read(self, peer: socket.socket) -> int:
        until = time.monotonic() + CONNECT
        proven = rpc.prove(peer, self._secret, _role(self._source), until)
        peer.settimeout(STALL)
        proven.send(_REQUEST.pack(*self.key))
        (size,) = _SIZE.unpack(_message(proven))
        if size == _NOT_HERE:
            raise ConnectionError(f"{self.key} is not on this host")
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        try:
            _copy(proven, fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _role(place: Address) -> bytes:
    """Return the file server's role in the authentication (see authentication.py)."""
    return f"islands {place[0]} {place[1]}".encode()


def _message(peer: rpc.Connection) -> bytes:
    """Return the next message from `peer`. Raises OSError if none arrives or its MAC is wrong."""
    try:
        message = peer.receive()
    except authentication.Forged as error:
        raise ConnectionError(str(error)) from None
    if message is None:
        raise ConnectionError("the connection ended")
    return message


def _send_file(peer: rpc.Connection, fd: int) -> None:
    """Send a file's size, content and MAC. Raises OSError if the connection fails."""
    size, place = os.fstat(fd).st_size, 0
    peer.send(_SIZE.pack(size))
    sum_of_all, buffer = peer.seals.sends_bulk(), memoryview(bytearray(min(size, CHUNK)))
    while place < size:
        # Read at explicit offsets: descriptors of the same file share their position, and several
        # hosts may fetch it at the same time.
        count = os.preadv(fd, [buffer], place)
        if not count:
            raise ConnectionError(f"the file ended at byte {place} of {size}")
        place += count
        # The kernel sends the chunk while we add it to the MAC.
        peer.socket.sendall(buffer[:count])
        sum_of_all.update(buffer[:count])
    peer.socket.sendall(sum_of_all.digest())


def _copy(peer: rpc.Connection, fd: int, size: int) -> None:
    """Copy `size` bytes from `peer` to the file `fd`.

    Raises OSError if the connection fails or the MAC is wrong.
    """
    buffer = memoryview(bytearray(min(size, CHUNK)))
    sum_of_all = peer.seals.receives_bulk()
    while size:
        received = peer.socket.recv_into(buffer[: min(size, CHUNK)])
        if not received:
            raise ConnectionError(f"the connection ended {size} bytes too early")
        size -= received
        sum_of_all.update(buffer[:received])
        remaining = buffer[:received]
        while remaining:
            remaining = remaining[os.write(fd, remaining) :]
    seal = _exactly(peer.socket, authentication.MAC)
    if not hmac.compare_digest(seal, sum_of_all.digest()):
        raise ConnectionError("the file was changed in transit")


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        if not chunk:
            raise ConnectionError("the connection ended")
        data += chunk
    return data
