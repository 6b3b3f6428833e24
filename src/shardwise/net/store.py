"""The key-value store of the rendezvous, in rank 0's memory, for ranks that know the secret.

    rank 0       KeyValueTable ◀─ HostStore
    other ranks  ClientStore ─▶ a connection each (rpc.py) ─▶ a thread of rank 0 ─▶ KeyValueTable

torch's own TCPStore serves anybody who connects. Here a connection lasts as long as its rank, and
rank 0 accepts no more connections once all ranks have registered.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.net import authentication, listeners, rpc

SLICE = 1.0
"""Longest time in seconds that rank 0 waits for a key before it answers that the key is missing."""

DRAWN_OUT = 2.0
"""Seconds that a rank waits beyond the limit of its request, since rank 0 may be busy."""


def role_of(port: int) -> bytes:
    """Return the role of rank 0's store at `port` (see authentication.py)."""
    return f"store {port}".encode()


class KeyValueTable:
    """A thread-safe table of values by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._arrivals: dict[str, threading.Condition] = {}

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, which starts at 0, and return the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set `value` if the present value is `expected`; a missing value counts as empty.

        Returns the value after the call, or `expected` for a missing key.
        """
        with self._lock:
            if self._values.get(key, b"") == expected:
                self._put(key, value)
            return self._values.get(key, expected)

    def delete(self, key: str) -> bool:
        """Delete `key`. Return whether it existed."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def absent(self, keys: Sequence[str], until: float = 0.0) -> list[str]:
        """Return the keys still missing at `until`, a time of the monotonic clock."""
        with self._lock:
            for key in keys:
                while key not in self._values:
                    left = until - time.monotonic()
                    # One condition per key: a `set` wakes only the threads that wait for its key.
                    arrival = self._arrivals.setdefault(key, threading.Condition(self._lock))
                    if left <= 0 or not arrival.wait(left):
                        return [each for each in keys if each not in self._values]
        return []

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if (awaited := self._arrivals.pop(key, None)) is not None:
            awaited.notify_all()


class _TableStore(Store):
    """A store with torch's interface over a table. torch calls these methods, also from C++.

    `timeout` is the default for waits, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.seconds = timeout
        self.set_timeout(timedelta(seconds=timeout))

    @abstractmethod
    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        """Return the keys that are still missing after `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections and end the threads."""

    @abstractmethod
    def _do(self, verb: str, *given: Any) -> Any:
        """Call a method of the table."""

    def set(self, key: str, value: str | bytes) -> None:
        listeners.note(_bytes(value))
        self._do("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._do("get", key)
        if value is None:
            raise dist.DistStoreError(f"{key} was deleted while it was read")
        return bytes(value)

    def add(self, key: str, amount: int) -> int:
        return int(self._do("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return bytes(self._do("compare_set", key, _bytes(expected), _bytes(value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._do("delete", key))

    def num_keys(self) -> int:
        return int(self._do("count"))

    def check(self, keys: Sequence[str]) -> bool:
        return not self.absent(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        missing = self.absent(keys, seconds)
        if missing:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, for {', '.join(missing)}")

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return False


class HostStore(_TableStore):
    """Rank 0's side of the store.

    Accepts ranks that know `secret` at `listener`, which it owns, until `accept_no_more`.
    """

    def __init__(self, listener: socket.socket, secret: bytes, timeout: float) -> None:
        super().__init__(timeout)
        self._table = KeyValueTable()
        role = role_of(listener.getsockname()[1])
        self._server = rpc.Server(listener, secret, role, self._serve, name="shardwise-store")

    def _do(self, verb: str, *given: Any) -> Any:
        return getattr(self._table, verb)(*given)

    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        return self._table.absent(keys, time.monotonic() + seconds)

    def accept_no_more(self) -> None:
        """Accept no more connections."""
        self._server.accept_no_more()

    def close(self) -> None:
        self._server.accept_no_more()
        # A handler may be waiting for a key on behalf of its rank, so do not wait for its thread.
        self._server.close(0.0)

    def _serve(self, connection: rpc.Connection) -> None:
        """Answer the requests of a rank until it disconnects."""
        while (request := connection.receive()) is not None:
            verb, *given = rpc.decode(request)
            connection.send(rpc.encode(self._answer(verb, given)))

    def _answer(self, verb: str, given: list[Any]) -> Any:
        if verb == "absent":
            # A short wait at a time: the thread of a rank that has gone must find that out. The
            # client asks again until its own limit.
            keys, seconds = given
            return self._table.absent(keys, time.monotonic() + min(seconds, SLICE))
        if verb not in _VERBS:
            raise ValueError(f"no such verb: {verb}")
        return self._do(verb, *given)


_VERBS = ("set", "get", "add", "compare_set", "delete", "count")
"""The methods of the table that other ranks may call."""


class ClientStore(_TableStore):
    """The other ranks' side of the store, over an authenticated connection."""

    def __init__(self, connection: rpc.Connection, timeout: float) -> None:
        super().__init__(timeout)
        self._connection = connection
        self._lock = threading.Lock()
        self._broken = ""
        """Why no more requests can be sent; "" while the connection works."""

    def _do(self, verb: str, *given: Any) -> Any:
        return self._ask(self.seconds, verb, *given)

    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            missing: list[str] = self._ask(left, "absent", list(keys), left)
            if not missing or time.monotonic() >= until:
                return missing

    def _ask(self, seconds: float, verb: str, *given: Any) -> Any:
        with self._lock:  # NCCL uses the store from its own thread
            if self._broken:
                raise dist.DistStoreError(self._broken)
            # Set before the request: KeyboardInterrupt may leave half a reply on the connection,
            # which the next request would take for its own.
            self._broken = "an earlier request to rank 0 was interrupted"
            try:
                reply = self._connection.call([verb, *given], seconds + DRAWN_OUT)
            except TimeoutError:
                self._broken = f"rank 0 has not answered for {seconds + DRAWN_OUT:g} s"
            except OSError as error:
                self._broken = f"rank 0 is gone: {error.strerror or error}"
            except authentication.Forged as error:
                self._broken = f"an answer was not from rank 0: {error}"
            else:
                self._broken = ""
                return reply
            raise dist.DistStoreError(self._broken)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
