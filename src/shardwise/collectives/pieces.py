"""Flat buffers as pieces that follow one another, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Move `pieces` into `buffer`, but for those that lie there."""
    start = 0
    for piece in pieces:
        place = buffer[start : start + piece.numel()]
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece)
        start += piece.numel()


def clipped(pieces: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """What of `pieces` lies between two places; one tensor at least, be it empty."""
    found, start = [], 0
    for piece in pieces:
        a, b = max(first - start, 0), min(end - start, piece.numel())
        if a < b:
            found.append(piece[a:b])
        start += piece.numel()
    return found or [pieces[0][:0]]


def shorter(pieces: Sequence[Tensor], longest: int) -> list[Tensor]:
    """The same, none of more than `longest` elements."""
    return [
        part
        for piece in pieces
        for part in (torch.split(piece, longest) if piece.numel() > longest else (piece,))
    ]


def rows(flat: Tensor, count: int, lengths: Sequence[int]) -> list[Sequence[Tensor]]:
    """`flat` as `count` rows of pieces of these `lengths`."""
    each = sum(lengths)
    return [torch.split(flat[i * each : (i + 1) * each], list(lengths)) for i in range(count)]
