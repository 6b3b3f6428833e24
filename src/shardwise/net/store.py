"""The key-value store on which ranks meet: in rank 0's memory, for ranks that know the secret.

    rank 0      KeyValueTable ◀─ HostStore
    the others  ClientStore ─▶ a connection each, sealed JSON ─▶ a thread of rank 0 ─▶ KeyValueTable

torch's own store would do for torch, but it asks nobody who it is. A connection lasts as long as
its rank; nobody is accepted any more once all have come.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.net import authentication, listeners

SLICE = 1.0
"""Seconds that rank 0 lets a connection wait for a key before it says that there is none yet."""

DRAWN_OUT = 2.0
"""Seconds beyond a limit of its own in which rank 0, which may be busy, may still answer."""

_opened: WeakSet[socket.socket] = WeakSet()

Message = dict[str, Any]


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
                    if left <= 0 or not self._arrival(key).wait(left):
                        return [each for each in keys if each not in self._values]
        return []

    def _arrival(self, key: str) -> threading.Condition:
        return self._arrivals.setdefault(key, threading.Condition(self._lock))

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
        self._bells = socket.socketpair()
        self._connections: list[socket.socket] = []
        _opened.update((listener, *self._bells))
        self._accepting = _started(self._accept, listener, secret)

    def _do(self, verb: str, *given: Any) -> Any:
        return getattr(self._table, verb)(*given)

    def absent(self, keys: Sequence[str], seconds: float = 0.0) -> list[str]:
        return self._table.absent(keys, time.monotonic() + seconds)

    def accept_no_more(self) -> None:
        """Accept nobody from now on: all ranks have come."""
        self._bells[0].close()
        self._accepting.join()

    def close(self) -> None:
        self.accept_no_more()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, secret: bytes) -> None:
        bell, role = self._bells[1], role_of(listener.getsockname()[1])
        with listener, bell, authentication.Acceptor(listener, secret, role, bell) as acceptor:
            while (connection := acceptor.accept()) is not None:
                connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _opened.add(connection.socket)
                self._connections.append(connection.socket)
                _started(self._serve, connection)

    def _serve(self, connection: authentication.Connection) -> None:
        """Do what a rank asks for, until it leaves."""
        with connection, suppress(OSError, ValueError):
            while (asked := connection.receive()) is not None:
                verb, *given = json.loads(asked, object_hook=_from_json)
                connection.send(_encoded(self._answer(verb, given)))

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

    def __init__(self, connection: authentication.Connection, timeout: float) -> None:
        super().__init__(timeout)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._broken = ""
        """Why no question is asked any more."""
        _opened.add(connection.socket)

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
                _fail(self._broken)
            # Answers have no number: after a question without its whole answer, a late one would
            # be taken for the answer to the next question.
            self._broken = "an earlier question to rank 0 was interrupted"
            answer = None
            try:
                self._connection.socket.settimeout(seconds + DRAWN_OUT)
                self._connection.send(_encoded([verb, *given]))
                answer = self._connection.receive()
            except TimeoutError:
                self._broken = f"rank 0 has not answered for {seconds + DRAWN_OUT:g} s"
            except OSError as error:
                self._broken = f"rank 0 is gone: {error.strerror or error}"
            except authentication.Forged as error:
                self._broken = f"someone else has answered in the place of rank 0: {error}"
            else:
                self._broken = "rank 0 is gone" if answer is None else ""
            if answer is None or self._broken:
                _fail(self._broken)
        return json.loads(answer, object_hook=_from_json)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _fail(why: str) -> NoReturn:
    raise dist.DistStoreError(why) from None


def _started(target: Callable[..., None], *given: Any) -> threading.Thread:
    # A daemon, since the end of a process must not wait for who does not answer.
    thread = threading.Thread(target=target, args=given, name="shardwise-store", daemon=True)
    thread.start()
    return thread


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encoded(message: Any) -> bytes:
    return json.dumps(message, default=_as_json).encode()


def _as_json(value: object) -> Message:
    assert isinstance(value, bytes)
    return {"bytes": value.decode("latin-1")}


def _from_json(found: Message) -> bytes:
    return str(found["bytes"]).encode("latin-1")


def _in_forked_child() -> None:
    """A forked DataLoader worker must not hold our sockets open: an end would not be seen."""
    for opened in list(_opened):
        if (fd := opened.detach()) >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_in_forked_child)
