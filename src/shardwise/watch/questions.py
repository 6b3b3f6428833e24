"""One question to other ranks, each over a connection of its own, and their answers.

    asker ─▶ SECRET {"ask": "where"}\\n        answerer ─▶ {"rank": 3, ...}\\n, and closes

Connections last as long as their question, so nothing is left of a rank that does not answer.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

LONGEST = 1 << 20
"""Bytes of a question or an answer."""

HEARING = 1.0
"""Seconds that an asker has to put its question."""


def listen(address: str) -> socket.socket:
    """Where this rank is asked. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def answer(listener: socket.socket, secret: str, reply: Callable[[Message], Message]) -> None:
    """Take one question that has come, and answer it; one without the secret is not answered."""
    try:
        asker, _ = listener.accept()
    except OSError:  # it has left again
        return
    with asker, suppress(OSError, ValueError):
        asker.settimeout(HEARING)
        given, _, question = _line(asker).partition(b" ")
        if hmac.compare_digest(given, secret.encode()):
            asker.sendall(json.dumps(reply(json.loads(question))).encode() + b"\n")


def _line(asker: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = asker.recv(1 << 16)
        if not more or len(data) > LONGEST:
            raise ValueError("no question")
        data += more
    return data


def ask(
    places: Mapping[int, tuple[str, int]], secret: str, question: Message, patience: float
) -> dict[int, Message]:
    """The answers by rank, of those that answer within `patience` seconds."""
    asked = f"{secret} {json.dumps(question)}\n".encode()
    until = time.monotonic() + patience
    answers: dict[int, Message] = {}
    with selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            _connect(selector, rank, place)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, events in selector.select(left):
                if not _go_on(selector, key, events, asked, answers):
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
    selector.register(peer, selectors.EVENT_WRITE, (rank, bytearray()))


def _go_on(
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    events: int,
    asked: bytes,
    answers: dict[int, Message],
) -> bool:
    """Send the question or read on; whether more is to come."""
    peer, (rank, heard) = key.fileobj, key.data
    assert isinstance(peer, socket.socket)
    try:
        if events & selectors.EVENT_WRITE:
            peer.sendall(asked)  # it fits into the buffer of a new connection
            selector.modify(peer, selectors.EVENT_READ, key.data)
            return True
        heard += (more := peer.recv(1 << 16))
    except OSError:
        return False
    if heard.endswith(b"\n"):
        with suppress(ValueError):
            answers[rank] = json.loads(heard)
        return False
    return bool(more) and len(heard) < LONGEST
