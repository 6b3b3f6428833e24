"""Describes the messages of one call over Gloo: their pieces, contents and tags."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

Messages = Mapping[int, Sequence[Tensor]]
"""Tensors to send to, or receive from, each other rank, in order."""

Content = tuple[str, tuple[int, ...], torch.dtype | None]
"""Description of the messages from one rank to another in a call.

It contains the name of the collective, the number of elements in each message, and the dtype.
"""

NOTHING: Content = ("nothing", (), None)


def tag(what: str, call: int, tensor: Tensor) -> int:
    """Return a message's tag, made of its call and a hash of its collective, length and dtype."""
    # A rank that is in a different collective, or uses a different length, sends a tag that nobody
    # receives. The wait then ends with an error, and the data never reaches the wrong buffer. Gloo
    # delivers messages with the same tag in the order of sending, so pieces of equal length need no
    # number.
    kind = zlib.crc32(f"{what} {tensor.numel()} {tensor.dtype}".encode())
    return (call % 2**16) << 14 | kind % 2**14


def contents(what: str, messages: Messages) -> dict[int, Content]:
    """Return a description of the messages sent to each rank, or received from it."""
    return {
        rank: (what, tuple(t.numel() for t in tensors if t.numel()), tensors[0].dtype)
        for rank, tensors in messages.items()
    }


def interleaved(messages: Messages) -> Iterator[tuple[int, Tensor]]:
    """Yield each message with its rank: every rank's first message, then every second one, etc."""
    # In this order a piece can be summed as soon as all ranks have sent it, while later pieces are
    # still in transit.
    for several in zip_longest(*messages.values()):
        yield from ((r, t) for r, t in zip(messages, several, strict=True) if t is not None)


def nbytes(messages: Messages) -> int:
    return sum(tensor.nbytes for tensors in messages.values() for tensor in tensors)


def as_json(content: Content) -> list[Any]:
    """Convert a description of messages to JSON-compatible values, for another process."""
    what, lengths, dtype = content
    return [what, list(lengths), str(dtype or "").removeprefix("torch.")]


def in_words(content: list[Any]) -> str:
    """Describe `content` (messages) in words, for an error message."""
    what, lengths, dtype = content
    return f"{what} of {sum(lengths)} {dtype} values" if dtype else "nothing to be received"


# -- buffers in pieces ------------------------------------------------------------------------


def clipped_pieces(pieces: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """Return views of `pieces` that cover [first, end) of their concatenation.

    The list contains at least one view, which may be empty, because callers need the dtype.
    """
    found, start = [], 0
    for piece in pieces:
        a, b = max(first - start, 0), min(end - start, piece.numel())
        if a < b:
            found.append(piece[a:b])
        start += piece.numel()
    return found or [pieces[0][:0]]


def without_long_pieces(pieces: Sequence[Tensor], longest: int) -> list[Tensor]:
    """Split `pieces` so that each has at most `longest` elements."""
    return [
        part
        for piece in pieces
        for part in (torch.split(piece, longest) if piece.numel() > longest else (piece,))
    ]


def rows_of_pieces(flat: Tensor, count: int, lengths: Sequence[int]) -> list[Sequence[Tensor]]:
    """Split `flat` into `count` rows, and each row into pieces of the given `lengths`."""
    each = sum(lengths)
    return [torch.split(flat[i * each : (i + 1) * each], list(lengths)) for i in range(count)]
