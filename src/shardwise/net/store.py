"""Implements the rendezvous's key-value store, in rank 0's memory, for ranks that know the secret.

    rank 0       KeyValueTable ◀─ HostStore
    other ranks  ClientStore ─▶ own connection (rpc.py) ─▶ own thread on rank 0 ─▶ KeyValueTable

torch's TCPStore serves anybody who connects. This store requires the secret. Once all ranks have
registered, it accepts no new connections, and each rank continues to use its existing one.
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
"""Maximum time in seconds that rank 0 waits for a key before it replies that the key is missing."""

DRAWN_OUT = 2.0
"""Seconds that a rank waits beyond its request's time limit, because rank 0 may be busy."""


def role_of(port: int) -> bytes:
    """Return the role of rank 0's store at `port` (see authentication.py)."""
    return f"store {port}".encode()


class KeyValueTable:
    """A thread-safe dictionary whose readers can wait for keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._arrivals: dict[str, threading.Condition] = {}
        self._is_final = False

    def give_up(self) -> None:
        """Make all waits for missing keys fail, because a rank has disconnected."""
        with self._lock:
            self._is_final = True
            for arrival in self._arrivals.values():
                arrival.notify_all()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key`, which starts at 0. Return the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set `value` if the current value equals `expected`. A missing value is treated as empty.

        Returns the value after the call, or `expected` if the key is still missing.
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
        """Wait for `keys` until the monotonic time `until`.

        Returns the keys that are still missing. Raises DistStoreError after `give_up`.
        """
        with self._lock:
            for key in keys:
                while key not in self._values:
                    if self._is_final:
                        raise dist.DistStoreError("a rank is gone: it has disconnected")
                    left = until - time.monotonic()
                    # One condition per key, so that `set` wakes only the threads waiting for that
                    # key.
                    arrival = self._arrivals.setdefault(key, threading.Condition(self._lock))
                    if left <= 0 or not arrival.wait(left):
                        return [each for each in keys if each not in self._values]
        return []

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if (awaited := self._arrivals.pop(key, None)) is not None:
            awaited.notify_all()


class _TableStore(Store):
    """Base class for stores that expose a `KeyValueTable` through torch's Store interface.

    torch calls these methods from Python and C++. `timeout` is the default limit for waits, in
    seconds.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.seconds = timeout
        self.set_timeout(timedelta(seconds=timeout))

    @abstractmethod
    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        """Wait at most `seconds` seconds for `keys`. Return the keys that are still missing."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections and stop the threads."""

    @abstractmethod
    def _do(self, verb: str, *given: Any) -> Any:
        """Call the table's method `verb` and return its result."""

    def set(self, key: str, value: str | bytes) -> None:
        listeners.note(_bytes(value))
        self._do("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._do("get", key)
        if value is None:
            raise dist.DistStoreError(f"{key} was deleted while it was read")
        listeners.note(bytes(value))
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
    """Rank 0's side of the store, which holds the table.

    It owns `listener`. Until `accept_no_more` is called, it accepts connections from ranks that
    know `secret`. If `survives` is true, no rank waits for a key after `accept_no_more` if a rank
    has disconnected.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, timeout: float, *, survives: bool = False
    ) -> None:
        super().__init__(timeout)
        self._survives = survives
        self._is_complete = self._has_lost = False
        self._turn = threading.Lock()
        self._table = KeyValueTable()
        role = role_of(listener.getsockname()[1])
        self._server = rpc.Server(listener, secret, role, self._serve, name="shardwise-store")

    def _do(self, verb: str, *given: Any) -> Any:
        return getattr(self._table, verb)(*given)

    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        return self._table.absent(keys, time.monotonic() + seconds)

    def accept_no_more(self) -> None:
        self._server.accept_no_more()
        with self._turn:
            self._is_complete = True
            if self._has_lost:
                self._table.give_up()

    def close(self) -> None:
        self._server.accept_no_more()
        # A handler thread may be waiting for a key on behalf of its rank, so do not join it.
        self._server.close(0.0)

    def _serve(self, connection: rpc.Connection) -> None:
        """Answer a rank's requests until the rank disconnects."""
        try:
            while (request := connection.receive()) is not None:
                verb, *given = rpc.decode(request)
                connection.send(rpc.encode(self._answer(verb, given)))
        except dist.DistStoreError:  # the rank notices that the connection ends
            return
        finally:
            # With --survive, two ranks may connect to each other while a third one is lost. Until
            # all ranks are here, the one that waits for them notices itself, and knows who is lost.
            with self._turn:
                self._has_lost = self._survives
                if self._survives and self._is_complete:
                    self._table.give_up()

    def _answer(self, verb: str, given: list[Any]) -> Any:
        if verb == "absent":
            # Wait only briefly, so that the thread notices if its rank has disconnected. The client
            # repeats the request until its own limit.
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
        """The reason why no more requests can be sent, or "" if the connection works."""

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
            # Mark the connection as broken before the request: a KeyboardInterrupt may leave half a
            # reply on it, which the next request would mistake for its own reply.
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
