"""Describes the messages of one call over Gloo: their pieces, their contents, their tags."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

Messages = Mapping[int, Sequence[Tensor]]
"""What goes to each of the other ranks, or comes from it, one tensor after the other."""

Content = tuple[str, tuple[int, ...], torch.dtype | None]
"""What one rank sends another in a call: of which collective, how many elements in each message,
of which dtype."""

NOTHING: Content = ("nothing", (), None)


def tag(what: str, call: int, tensor: Tensor) -> int:
    """The tag of a message: its call's number, and what it is.

    So a rank that is in another collective, or sends another length, is waited for until the
    time-out says so; its message is never taken for what it is not. Messages of one tag come in
    the order in which they were sent.
    """
    kind = zlib.crc32(f"{what} {tensor.numel()} {tensor.dtype}".encode())
    return (call % 2**16) << 14 | kind % 2**14


def contents(what: str, messages: Messages) -> dict[int, Content]:
    """By rank, what is sent to it or awaited of it."""
    return {
        rank: (what, tuple(t.numel() for t in tensors if t.numel()), tensors[0].dtype)
        for rank, tensors in messages.items()
    }


def interleaved(messages: Messages) -> Iterator[tuple[int, Tensor]]:
    """Each message with its rank: the first of every rank, then the second ones."""
    for several in zip_longest(*messages.values()):
        yield from ((r, t) for r, t in zip(messages, several, strict=True) if t is not None)


def nbytes(messages: Messages) -> int:
    """Bytes of all messages."""
    return sum(tensor.nbytes for tensors in messages.values() for tensor in tensors)


def as_json(content: Content) -> list[Any]:
    """A content, to be sent to another process."""
    what, lengths, dtype = content
    return [what, list(lengths), str(dtype or "").removeprefix("torch.")]


def in_words(content: list[Any]) -> str:
    """A content, to be read by a person."""
    what, lengths, dtype = content
    return f"{what} of {sum(lengths)} {dtype} values" if dtype else "nothing to be received"


# -- buffers in pieces ------------------------------------------------------------------------


def clipped_pieces(pieces: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """The parts of `pieces` between two places of the buffer that they make up, at least one.

    Pieces follow one another, wherever they lie in memory. The one part may be empty.
    """
    found, start = [], 0
    for piece in pieces:
        a, b = max(first - start, 0), min(end - start, piece.numel())
        if a < b:
            found.append(piece[a:b])
        start += piece.numel()
    return found or [pieces[0][:0]]


def without_long_pieces(pieces: Sequence[Tensor], longest: int) -> list[Tensor]:
    """`pieces` cut so that none has more than `longest` elements."""
    return [
        part
        for piece in pieces
        for part in (torch.split(piece, longest) if piece.numel() > longest else (piece,))
    ]


def rows_of_pieces(flat: Tensor, count: int, lengths: Sequence[int]) -> list[Sequence[Tensor]]:
    """`flat` as `count` rows of pieces of these `lengths`."""
    each = sum(lengths)
    return [torch.split(flat[i * each : (i + 1) * each], list(lengths)) for i in range(count)]
