"""Asks other ranks one question, each over a connection of its own, and answers theirs.

    asker ─▶ proof, {"ask": "where"}\\n        answerer ─▶ proof, {"rank": 3, ...}\\n, and closes

Connections last as long as their question, so nothing is left of a rank that does not answer.
Either end proves that it is of the run (authentication.py).
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.net import authentication

Message = dict[str, Any]

HEARING = 1.0
"""Seconds that an asker has to put its question."""


def listen(address: str) -> socket.socket:
    """Where this rank is asked. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def answer(asker: authentication.Connection, reply: Callable[[Message], Message]) -> None:
    """Take the question of one that has proved itself, answer it and hang up."""
    with asker, suppress(OSError, ValueError):
        asker.socket.settimeout(HEARING)
        if (question := asker.receive()) is not None:
            asker.send(json.dumps(reply(json.loads(question))).encode())


class Place(NamedTuple):
    """Where a rank answers: `port` of `address`, in a `role` (see authentication.py)."""

    address: str
    port: int
    role: bytes


@dataclass
class _Asked:
    """A rank on the way from a connection to its answer: what it has said so far, until it has
    proved itself; then the seals of what follows."""

    rank: int
    role: bytes
    heard: bytearray = field(default_factory=bytearray)
    claim: authentication.Proof | None = None
    seals: authentication.Seals | None = None
    is_proven: bool = False


def ask(
    places: Mapping[int, Place], secret: bytes, question: Message, patience: float
) -> dict[int, Message]:
    """The answers by rank, of those that answer within `patience` seconds."""
    asks = json.dumps(question).encode()
    until = time.monotonic() + patience
    answers: dict[int, Message] = {}
    with selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            _connect(selector, rank, place)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not _go_on(key, secret, asks, answers):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answers


def _connect(selector: selectors.BaseSelector, rank: int, place: Place) -> None:
    try:
        peer = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
    except OSError:  # no more descriptors; what this rank has to say matters more
        return
    peer.setblocking(False)
    peer.connect_ex((place.address, place.port))
    selector.register(peer, selectors.EVENT_READ, _Asked(rank, place.role))


def _go_on(
    key: selectors.SelectorKey, secret: bytes, asks: bytes, answers: dict[int, Message]
) -> bool:
    """Hear on, and ask once a nonce has come; whether more is to come."""
    peer, asked = key.fileobj, key.data
    assert isinstance(peer, socket.socket)
    assert isinstance(asked, _Asked)
    try:
        more = peer.recv(1 << 16)
        asked.heard += more
        if asked.claim is None and len(asked.heard) >= authentication.NONCE:
            nonce = bytes(asked.heard[: authentication.NONCE])
            del asked.heard[: authentication.NONCE]
            asked.claim = authentication.Proof(secret, asked.role, nonce)
            asked.seals = asked.claim.seals()
            # They fit into the buffer of a new connection.
            peer.sendall(asked.claim.words + asked.seals.frame(asks))
    except OSError:
        return False
    try:
        return bool(more) and not _has_answered(asked, answers)
    except ValueError:  # it does not know the secret, or sends what no rank does
        return False


def _has_answered(asked: _Asked, answers: dict[int, Message]) -> bool:
    """Note the answer, if all of it has come and its sender has proved itself. Raises
    ValueError."""
    if asked.claim is None or asked.seals is None:
        return False
    if not asked.is_proven:
        if len(asked.heard) < authentication.MAC:
            return False
        if not asked.claim.is_answered_by(bytes(asked.heard[: authentication.MAC])):
            raise authentication.Forged("no proof")
        asked.is_proven = True
        del asked.heard[: authentication.MAC]
    asked.seals.take(bytes(asked.heard))
    asked.heard.clear()
    if (message := asked.seals.next()) is None:
        return False
    answers[asked.rank] = json.loads(message)
    return True
