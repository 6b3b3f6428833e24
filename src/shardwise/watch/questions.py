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
from typing import Any

from shardwise import authentication

Message = dict[str, Any]

LONGEST = 1 << 20
"""Bytes of a question or an answer."""

HEARING = 1.0
"""Seconds that an asker has to put its question."""


def listen(address: str) -> socket.socket:
    """Where this rank is asked. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def answer(asker: socket.socket, reply: Callable[[Message], Message]) -> None:
    """Take the question of one that has proved itself, answer it and hang up."""
    with asker, suppress(OSError, ValueError):
        asker.settimeout(HEARING)
        asker.sendall(json.dumps(reply(json.loads(_line(asker)))).encode() + b"\n")


def _line(asker: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = asker.recv(1 << 16)
        if not more or len(data) > LONGEST:
            raise ValueError("no question")
        data += more
    return data


@dataclass
class _Asked:
    """A rank on the way from a connection to its answer: what it has said so far."""

    rank: int
    heard: bytearray = field(default_factory=bytearray)
    claim: authentication.Proof | None = None


def ask(
    places: Mapping[int, tuple[str, int]], secret: bytes, question: Message, patience: float
) -> dict[int, Message]:
    """The answers by rank, of those that answer within `patience` seconds."""
    line = json.dumps(question).encode() + b"\n"
    until = time.monotonic() + patience
    answers: dict[int, Message] = {}
    with selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            _connect(selector, rank, place)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not _go_on(key, secret, line, answers):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answers


def _connect(selector: selectors.BaseSelector, rank: int, place: tuple[str, int]) -> None:
    try:
        peer = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    except OSError:  # no more descriptors; what this rank has to say matters more
        return
    peer.setblocking(False)
    peer.connect_ex(place)
    selector.register(peer, selectors.EVENT_READ, _Asked(rank))


def _go_on(
    key: selectors.SelectorKey, secret: bytes, line: bytes, answers: dict[int, Message]
) -> bool:
    """Hear on, and ask once a nonce has come; whether more is to come."""
    peer, asked = key.fileobj, key.data
    assert isinstance(peer, socket.socket)
    assert isinstance(asked, _Asked)
    try:
        asked.heard += (more := peer.recv(1 << 16))
        if asked.claim is None and len(asked.heard) >= authentication.NONCE:
            asked.claim = authentication.Proof(secret, bytes(asked.heard[: authentication.NONCE]))
            del asked.heard[: authentication.NONCE]
            peer.sendall(asked.claim.words + line)  # they fit into the buffer of a new connection
    except OSError:
        return False
    if asked.claim is None or not asked.heard.endswith(b"\n"):
        return bool(more) and len(asked.heard) < LONGEST
    return _is_unfinished(asked, answers) and bool(more)


def _is_unfinished(asked: _Asked, answers: dict[int, Message]) -> bool:
    """Note the answer, where it is whole and of who knows the secret; whether it is not whole."""
    proven, said = bytes(asked.heard[: authentication.MAC]), asked.heard[authentication.MAC :]
    if not said.endswith(b"\n"):  # what ended a line was of the proof
        return True
    assert asked.claim is not None
    if asked.claim.is_answered_by(proven):
        with suppress(ValueError):
            answers[asked.rank] = json.loads(said)
    return False
