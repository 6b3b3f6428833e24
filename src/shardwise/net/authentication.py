"""Lets processes of one run prove that they know its secret, and seals what they send.

    accepts   ─▶ a nonce
    connects  ─▶ another nonce, and a MAC of both and of the role
    accepts   ─▶ another MAC of the same
    both      ─▶ messages, each with a MAC by a key of this connection and direction

Who cannot is cut off before any other byte of it is read; who says nothing keeps nobody waiting.

The *role* names the end that accepts, such as b"status 3": what it does, and which process it is.
The end that connects names whom it means to reach. So a proof that someone passes on to another
process of the run proves nothing there, and someone in between can neither change, repeat, omit nor
add a message, because each MAC covers the number of its message.

What others may read on the way is not encrypted. MACs are HMAC-SHA-256, compared in constant time.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

NONCE = 16
MAC = sha256().digest_size
CLAIM = NONCE + MAC
"""Bytes by which who connects proves itself."""

PATIENCE = 5.0
"""Seconds that who connects has for that."""

MOST = 128
"""So many may be at it at a time; for one more, the oldest is turned away."""

LONGEST = 1 << 26
"""Bytes of the longest message."""

_LENGTH = 4
_HEAD = _LENGTH + MAC

RETRY = 0.05
"""Seconds until a listener that had no descriptor to accept with looks again."""


HUNG_UP = "who listens there hung up: it knows another secret, or is of another run"


class Unproven(OSError):
    """The other end of a connection has not proved that it knows the secret."""


class Forged(ValueError):
    """What came was not sealed by who knows the secret."""


def mac(secret: bytes, *parts: bytes) -> bytes:
    """The MAC of `parts`; each with its length, so that no two lists of parts are alike."""
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, whole, "sha256")


def sealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """`data` for `purpose`, with its MAC in front."""
    return mac(secret, b"seal", purpose.encode(), data) + data


def unsealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """What `sealed` was given. Raises Forged for anything else."""
    given, content = data[:MAC], data[MAC:]
    if not hmac.compare_digest(given, mac(secret, b"seal", purpose.encode(), content)):
        raise Forged(f"{len(data)} bytes for {purpose!r} have no MAC of this run.")
    return content


class Proof:
    """The proof that a connecting process sends for a `nonce`, and the one that it expects."""

    def __init__(self, secret: bytes, role: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._about = role, nonce, secrets.token_bytes(NONCE)
        self.words = self._about[-1] + mac(secret, b"connects", *self._about)

    def is_answered_by(self, answer: bytes) -> bool:
        """Whether who accepts has this role and knows the secret too."""
        return hmac.compare_digest(answer, mac(self._secret, b"accepts", *self._about))

    def seals(self) -> Seals:
        """The seals of this connection, for the end that connects."""
        return Seals(*_keys(self._secret, self._about))


def _keys(secret: bytes, about: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """The keys for what the connecting, and the accepting, end of a connection sends."""
    return mac(secret, b"key connects", *about), mac(secret, b"key accepts", *about)


class Seals:
    """Seals the messages that one end of a connection sends, and opens those that it receives.

    A message is its length (4 bytes), its MAC, and its content.
    """

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._keys = sends, receives
        self._sent = self._received = 0
        self._rest = bytearray()

    def frame(self, message: bytes) -> bytes:
        """The bytes to send for `message`."""
        seal = mac(self._keys[0], self._sent.to_bytes(8, "big"), message)
        self._sent += 1
        return len(message).to_bytes(_LENGTH, "big") + seal + message

    def take(self, data: bytes) -> None:
        """Append bytes that were received."""
        self._rest += data

    @property
    def missing(self) -> int:
        """How many bytes the next message needs at least, beyond those that were received.

        Raises Forged for a length that no message has.
        """
        if len(self._rest) < _HEAD:
            return _HEAD - len(self._rest)
        length = int.from_bytes(self._rest[:_LENGTH], "big")
        if length > LONGEST:
            raise Forged(f"A message of {length} bytes is longer than any of this run.")
        return max(0, _HEAD + length - len(self._rest))

    def next(self) -> bytes | None:
        """Take out the next message; None until all of it was received. Raises Forged."""
        if self.missing:
            return None
        end = _HEAD + int.from_bytes(self._rest[:_LENGTH], "big")
        seal, message = bytes(self._rest[_LENGTH:_HEAD]), bytes(self._rest[_HEAD:end])
        del self._rest[:end]
        number = self._received.to_bytes(8, "big")
        if not hmac.compare_digest(seal, mac(self._keys[1], number, message)):
            raise Forged(f"A message of {len(message)} bytes was not sealed by the other end.")
        self._received += 1
        return message

    def sends_bulk(self) -> hmac.HMAC:
        """A MAC to update with bytes that are sent as they are; its digest follows them."""
        return self._bulk(self._keys[0], self._sent)

    def receives_bulk(self) -> hmac.HMAC:
        """The MAC that the other end's `sends_bulk` is."""
        return self._bulk(self._keys[1], self._received)

    @staticmethod
    def _bulk(key: bytes, number: int) -> hmac.HMAC:
        return hmac.new(mac(key, b"bulk", number.to_bytes(8, "big")), digestmod="sha256")


class Connection:
    """A connection whose two ends have proved themselves: carries whole messages. A context."""

    def __init__(self, peer: socket.socket, seals: Seals) -> None:
        self.socket = peer
        self.seals = seals

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        """Send a message, blocking."""
        self.socket.sendall(self.seals.frame(message))

    def receive(self) -> bytes | None:
        """The next message, blocking; None at the end. Raises Forged.

        It reads no byte beyond that message.
        """
        while (message := self.seals.next()) is None:
            data = self.socket.recv(min(self.seals.missing, 1 << 16))
            if not data:
                return None
            self.seals.take(data)
        return message

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def prove(peer: socket.socket, secret: bytes, role: bytes, until: float) -> Connection:
    """Prove oneself to who accepted `peer` in a `role`, and hear its own proof, until a time of the
    monotonic clock. Raises Unproven where it knows another secret, has another role or hangs up,
    TimeoutError where it says nothing."""
    try:
        claim = Proof(secret, role, _exactly(peer, NONCE, until))
        peer.sendall(claim.words)
        answer = _exactly(peer, MAC, until)
    except ConnectionError:
        raise Unproven(HUNG_UP) from None
    if not claim.is_answered_by(answer):
        raise Unproven("who listens there does not know the secret of this run")
    return Connection(peer, claim.seals())


def _exactly(peer: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        peer.settimeout(max(0.001, until - time.monotonic()))
        more = peer.recv(count - len(data))
        if not more:
            raise Unproven(HUNG_UP)
        data += more
    return data


@dataclass(eq=False)
class _Stranger:
    """Who has connected, and not proved itself yet."""

    peer: socket.socket
    until: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    said: bytes = b""


class Acceptor:
    """Takes connections of those that prove that they know `secret`, several at a time.

    `role` is that of this process: those that mean another one are turned away. `bell` is a socket;
    once something, or its end, has come over it, nobody is accepted any more. A context, which
    closes neither the listener nor the bell.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        role: bytes,
        bell: socket.socket | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._role = role
        self._bell = bell
        self._strangers: list[_Stranger] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if bell is not None:
            self._selector.register(bell, selectors.EVENT_READ)

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        self._selector.close()

    def accept(self, until: float | None = None) -> Connection | None:
        """The next connection that has proved itself, blocking; None when the bell has rung, or at
        `until`, a time of the monotonic clock."""
        while until is None or time.monotonic() < until:
            for key, _ in self._selector.select(self._wait(until)):
                if key.fileobj is self._bell:
                    return None
                if key.fileobj is self._listener:
                    self._let_in()
                elif key.data in self._strangers and self._hear(key.data):
                    return self._proven(key.data)
            now = time.monotonic()
            for late in [each for each in self._strangers if each.until < now]:
                self._turn_away(late)
        return None

    def _wait(self, until: float | None) -> float | None:
        times = [each.until for each in self._strangers[:1]]
        times += [] if until is None else [until]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _let_in(self) -> None:
        """Give who has connected a nonce."""
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it has left again, or there is no descriptor for it
            if self._strangers:
                self._turn_away(self._strangers[0])
            else:
                time.sleep(RETRY)
            return
        if len(self._strangers) == MOST:
            self._turn_away(self._strangers[0])
        peer.setblocking(False)
        stranger = _Stranger(peer, time.monotonic() + PATIENCE)
        self._strangers.append(stranger)
        self._selector.register(peer, selectors.EVENT_READ, stranger)
        try:
            peer.send(stranger.nonce)  # it fits into the buffer of a new connection
        except OSError:
            self._turn_away(stranger)

    def _hear(self, stranger: _Stranger) -> bool:
        """Read on what it says, and no further than its proof; whether that holds."""
        try:
            more = stranger.peer.recv(CLAIM - len(stranger.said))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        stranger.said += more
        if more and len(stranger.said) < CLAIM:
            return False
        expected = mac(self._secret, b"connects", *self._about(stranger))
        if more and hmac.compare_digest(stranger.said[NONCE:], expected):
            return True
        self._turn_away(stranger)
        return False

    def _proven(self, stranger: _Stranger) -> Connection:
        """Its connection, once it was given our own proof."""
        self._forget(stranger)
        peer, about = stranger.peer, self._about(stranger)
        peer.setblocking(True)
        with suppress(OSError):  # it has left, which is found by reading
            peer.sendall(mac(self._secret, b"accepts", *about))
        receives, sends = _keys(self._secret, about)
        return Connection(peer, Seals(sends, receives))

    def _about(self, stranger: _Stranger) -> tuple[bytes, ...]:
        return self._role, stranger.nonce, stranger.said[:NONCE]

    def _turn_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.peer.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.peer)
