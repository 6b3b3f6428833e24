"""Proofs that a process knows the secret of its run, and seals for messages. Pure.

The end that accepts a connection has a *role*, such as b"status 3", which names its service and its
process. The end that connects names the role that it means to reach, and each proof covers the
role. So a proof that somebody relays to another process of the run is invalid there.

Each message has a MAC over its number and content, with a key for this connection and direction.
Somebody in between cannot change, repeat, omit or add a message. They can read it: nothing is
encrypted. MACs are HMAC-SHA-256, compared in constant time. rpc.py is the protocol over sockets.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

NONCE = 16
MAC = sha256().digest_size
CLAIM = NONCE + MAC
"""Bytes of the proof of the end that connects."""

LONGEST = 1 << 26
"""Bytes of the longest message."""

_LENGTH = 4
_HEAD = _LENGTH + MAC


class Forged(ValueError):
    """Received bytes that were not sealed by a process that knows the secret."""


def mac(secret: bytes, *parts: bytes) -> bytes:
    """Return the MAC of `parts`."""
    # Each part is prefixed with its length. Otherwise ("ab", "c") and ("a", "bc") would have the
    # same MAC.
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, whole, "sha256")


def sealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """Return `data` prefixed with its MAC for `purpose`."""
    return mac(secret, b"seal", purpose.encode(), data) + data


def unsealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """Return the data that `sealed` was called with. Raises Forged for anything else."""
    given, content = data[:MAC], data[MAC:]
    if not hmac.compare_digest(given, mac(secret, b"seal", purpose.encode(), content)):
        raise Forged(f"{len(data)} bytes for {purpose!r} have no MAC of this run.")
    return content


class Proof:
    """The proofs of both ends of a connection, for their two nonces and the role that accepts.

    `of_accepting` is the nonce of the end that accepts; the other end draws its own one.
    """

    def __init__(
        self, secret: bytes, role: bytes, of_accepting: bytes, of_connecting: bytes | None = None
    ) -> None:
        self._secret = secret
        # Both ends contribute a nonce, so that neither accepts a replay of a recorded connection.
        self._about = role, of_accepting, of_connecting or secrets.token_bytes(NONCE)
        self.words = self._about[-1] + mac(secret, b"connects", *self._about)
        """The proof that the connecting end sends."""
        self.answer = mac(secret, b"accepts", *self._about)
        """The proof that the accepting end sends back."""

    def is_proven_by(self, words: bytes) -> bool:
        """Return whether the end that connects knows the secret and means this role."""
        return hmac.compare_digest(words, self.words)

    def is_answered_by(self, answer: bytes) -> bool:
        """Return whether the end that accepts has this role and knows the secret too."""
        return hmac.compare_digest(answer, self.answer)

    def seals(self, *, accepts: bool = False) -> Seals:
        """Return the seals for the end that connects, or for the one that `accepts`."""
        keys = [mac(self._secret, b"key " + end, *self._about) for end in (b"connects", b"accepts")]
        return Seals(*reversed(keys)) if accepts else Seals(*keys)


class Seals:
    """Seals the messages that one end of a connection sends, and opens those that it receives.

    A message is its length (4 bytes), its MAC, and its content.
    """

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._keys = sends, receives
        self._sent = self._received = 0
        self._rest = bytearray()

    def frame(self, message: bytes) -> bytes:
        """Return the bytes to send for `message`."""
        seal = mac(self._keys[0], self._sent.to_bytes(8, "big"), message)
        self._sent += 1
        return len(message).to_bytes(_LENGTH, "big") + seal + message

    def take(self, data: bytes) -> None:
        """Append bytes that were received."""
        self._rest += data

    @property
    def missing(self) -> int:
        """The least number of bytes that are missing for the next message.

        Raises Forged for a length that no message has.
        """
        if len(self._rest) < _HEAD:
            return _HEAD - len(self._rest)
        length = int.from_bytes(self._rest[:_LENGTH], "big")
        if length > LONGEST:
            raise Forged(f"A message of {length} bytes is longer than any of this run.")
        return max(0, _HEAD + length - len(self._rest))

    def next(self) -> bytes | None:
        """Remove and return the next message; None while it is incomplete. Raises Forged."""
        if self.missing:
            return None
        end = _HEAD + int.from_bytes(self._rest[:_LENGTH], "big")
        seal, message = bytes(self._rest[_LENGTH:_HEAD]), bytes(self._rest[_HEAD:end])
        del self._rest[:end]
        # The number of the message is not sent. Both ends count, so the MAC is wrong as soon as
        # somebody repeats or drops a message.
        number = self._received.to_bytes(8, "big")
        if not hmac.compare_digest(seal, mac(self._keys[1], number, message)):
            raise Forged(f"A message of {len(message)} bytes was not sealed by the other end.")
        self._received += 1
        return message

    def sends_bulk(self) -> hmac.HMAC:
        """Return a MAC to update with bytes that are sent without one; its digest follows them."""
        return self._bulk(self._keys[0], self._sent)

    def receives_bulk(self) -> hmac.HMAC:
        """Return the MAC that `sends_bulk` of the other end returns."""
        return self._bulk(self._keys[1], self._received)

    @staticmethod
    def _bulk(key: bytes, number: int) -> hmac.HMAC:
        return hmac.new(mac(key, b"bulk", number.to_bytes(8, "big")), digestmod="sha256")
