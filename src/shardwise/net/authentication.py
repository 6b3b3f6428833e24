"""Proves that a process knows its run's secret, and authenticates messages. Does no I/O.

The accepting end of a connection has a *role*, such as b"status 3", which identifies its service
and its process. The connecting end names the role that it wants to reach, and each proof covers the
role. If an attacker relays a proof to a different process of the run, the proof is invalid there.

Each message carries a MAC (message authentication code) over its sequence number and content. Each
direction of each connection has its own key. An attacker in between cannot change, repeat, drop or
insert a message, but can read it: nothing is encrypted. MACs are HMAC-SHA-256, compared in constant
time. rpc.py implements the protocol over sockets.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

NONCE = 16
MAC = sha256().digest_size
CLAIM = NONCE + MAC
"""Size in bytes of the connecting end's proof."""

LONGEST = 1 << 26
"""Maximum size of a message, in bytes."""

_LENGTH = 4
_HEAD = _LENGTH + MAC


class Forged(ValueError):
    """Raised if received bytes do not carry a MAC from a process that knows the secret."""


def mac(secret: bytes, *parts: bytes) -> bytes:
    """Return the message authentication code (MAC) of the sequence `parts`."""
    # Each part is prefixed with its length. Otherwise ("ab", "c") and ("a", "bc") would have the
    # same MAC.
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, whole, "sha256")


def sealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """Return `data` prefixed with its MAC, which is valid only for `purpose`."""
    return mac(secret, b"seal", purpose.encode(), data) + data


def unsealed(secret: bytes, purpose: str, data: bytes) -> bytes:
    """Return the data that was passed to `sealed`. Raises Forged if the MAC is wrong."""
    given, content = data[:MAC], data[MAC:]
    if not hmac.compare_digest(given, mac(secret, b"seal", purpose.encode(), content)):
        raise Forged(f"{len(data)} bytes for {purpose!r} have no MAC of this run.")
    return content


class Proof:
    """The proofs of both ends of a connection, over their nonces and the accepting end's role.

    `of_accepting` is the accepting end's nonce, and `of_connecting` the connecting end's. If
    `of_connecting` is None, a new nonce is drawn.
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
        """Return whether `words` prove that the peer knows the secret and requests this role."""
        return hmac.compare_digest(words, self.words)

    def is_answered_by(self, answer: bytes) -> bool:
        """Return whether `answer` proves that the accepting end has this role and the secret."""
        return hmac.compare_digest(answer, self.answer)

    def seals(self, *, accepts: bool = False) -> Seals:
        """Return the `Seals` for the connecting end, or the accepting end if `accepts` is true."""
        keys = [mac(self._secret, b"key " + end, *self._about) for end in (b"connects", b"accepts")]
        return Seals(*reversed(keys)) if accepts else Seals(*keys)


class Seals:
    """Authenticates the messages at one end of a connection.

    It adds a MAC to each message sent, and checks the MAC of each message received. Each message is
    sent as its length (4 bytes), its MAC and its content.
    """

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._keys = sends, receives
        self._sent = self._received = 0
        self._rest = bytearray()

    def frame(self, message: bytes) -> bytes:
        """Return the bytes to send for `message`: its length, MAC and content."""
        seal = mac(self._keys[0], self._sent.to_bytes(8, "big"), message)
        self._sent += 1
        return len(message).to_bytes(_LENGTH, "big") + seal + message

    def take(self, data: bytes) -> None:
        """Append received bytes to the buffer."""
        self._rest += data

    @property
    def missing(self) -> int:
        """The minimum number of bytes still to be received before the next message is complete.

        Raises Forged if the announced length exceeds `LONGEST`.
        """
        if len(self._rest) < _HEAD:
            return _HEAD - len(self._rest)
        length = int.from_bytes(self._rest[:_LENGTH], "big")
        if length > LONGEST:
            raise Forged(f"A message of {length} bytes is longer than any of this run.")
        return max(0, _HEAD + length - len(self._rest))

    def next(self) -> bytes | None:
        """Remove and return the next message from the buffer, or return None if it is incomplete.

        Raises Forged if its MAC is wrong.
        """
        if self.missing:
            return None
        end = _HEAD + int.from_bytes(self._rest[:_LENGTH], "big")
        seal, message = bytes(self._rest[_LENGTH:_HEAD]), bytes(self._rest[_HEAD:end])
        del self._rest[:end]
        # The sequence number is not sent. Both ends count messages, so the MAC is wrong as soon as
        # somebody repeats or drops one.
        number = self._received.to_bytes(8, "big")
        if not hmac.compare_digest(seal, mac(self._keys[1], number, message)):
            raise Forged(f"A message of {len(message)} bytes was not sealed by the other end.")
        self._received += 1
        return message

    def sends_bulk(self) -> hmac.HMAC:
        """Return a MAC for bulk data that is sent without `frame`.

        Update it with the data, and send its digest after the data.
        """
        return self._bulk(self._keys[0], self._sent)

    def receives_bulk(self) -> hmac.HMAC:
        """Return a MAC for received bulk data. Its digest must equal the one from the sender."""
        return self._bulk(self._keys[1], self._received)

    @staticmethod
    def _bulk(key: bytes, number: int) -> hmac.HMAC:
        return hmac.new(mac(key, b"bulk", number.to_bytes(8, "big")), digestmod="sha256")
