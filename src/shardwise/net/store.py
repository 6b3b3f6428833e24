"""The key-value store on which ranks meet: in rank 0's memory, for ranks that know the secret.

    rank 0      KeyValueTable ◀─ HostStore
    the others  ClientStore ─▶ a connection each (rpc.py) ─▶ a thread of rank 0 ─▶ KeyValueTable

torch's own store would do for torch, but it lets anybody in. A connection lasts as long as its
rank. Rank 0 accepts nobody any more once all ranks are there.
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
"""Seconds that rank 0 lets a connection wait for a key before it says that there is none yet."""

DRAWN_OUT = 2.0
"""Seconds beyond a limit of its own in which rank 0, which may be busy, may still answer."""


def role_of(port: int) -> bytes:
    """The role in which rank 0 accepts at `port`; see authentication.py."""
    return f"store {port}".encode()


class KeyValueTable:
    """Values by key; safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._arrivals: dict[str, threading.Condition] = {}

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._put(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is there, 0 at first; the new one."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set `value` where `expected` is there, or nothing is and nothing is expected.

        Returns what is there then, or what was expected where nothing is.
        """
        with self._lock:
            if self._values.get(key, b"") == expected:
                self._put(key, value)
            return self._values.get(key, expected)

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def absent(self, keys: Sequence[str], until: float = 0.0) -> list[str]:
        """Those of `keys` that have not come by `until`, a time of the monotonic clock."""
        with self._lock:
            for key in keys:
                while key not in self._values:
                    left = until - time.monotonic()
                    arrival = self._arrivals.setdefault(key, threading.Condition(self._lock))
                    if left <= 0 or not arrival.wait(left):
                        return [each for each in keys if each not in self._values]
        return []

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if (awaited := self._arrivals.pop(key, None)) is not None:
            awaited.notify_all()


class _TableStore(Store):
    """A store as torch knows it, over a table. torch calls these methods, also from C++."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds is for waits that are given none."""
        super().__init__()
        self.seconds = timeout
        self.set_timeout(timedelta(seconds=timeout))

    @abstractmethod
    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        """Those of `keys` that have not come within `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads."""

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

    It accepts at `listener`, which it owns, ranks that know `secret`, until `accept_no_more`.
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
        """Accept nobody from now on: all ranks are there."""
        self._server.accept_no_more()

    def close(self) -> None:
        self._server.accept_no_more()
        # A rank may wait for a key: nobody waits for the thread that answers it.
        self._server.close(0.0)

    def _serve(self, connection: rpc.Connection) -> None:
        """Reply to the requests of a rank until it leaves."""
        while (request := connection.receive()) is not None:
            verb, *given = rpc.decode(request)
            connection.send(rpc.encode(self._answer(verb, given)))

    def _answer(self, verb: str, given: list[Any]) -> Any:
        if verb == "absent":
            keys, seconds = given
            return self._table.absent(keys, time.monotonic() + min(seconds, SLICE))
        if verb not in _VERBS:
            raise ValueError(f"no such verb: {verb}")
        return self._do(verb, *given)


_VERBS = ("set", "get", "add", "compare_set", "delete", "count")
"""What other ranks may ask for."""


class ClientStore(_TableStore):
    """The other ranks' side of the store, over a `connection` that is proven at both ends."""

    def __init__(self, connection: rpc.Connection, timeout: float) -> None:
        super().__init__(timeout)
        self._connection = connection
        self._lock = threading.Lock()
        self._broken = ""
        """Why no request is sent any more."""

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
        with self._lock:  # NCCL asks in a thread of its own
            if self._broken:
                raise dist.DistStoreError(self._broken)
            # Set before the request: KeyboardInterrupt may leave the connection with half a reply.
            self._broken = "an earlier question to rank 0 was interrupted"
            try:
                reply = self._connection.call([verb, *given], seconds + DRAWN_OUT)
            except TimeoutError:
                self._broken = f"rank 0 has not answered for {seconds + DRAWN_OUT:g} s"
            except OSError as error:
                self._broken = f"rank 0 is gone: {error.strerror or error}"
            except authentication.Forged as error:
                self._broken = f"someone else has answered in the place of rank 0: {error}"
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
