"""Exchanges parts of sequences for heads, so that each rank runs whole sequences for its heads.

The method is from Jacobs et al., "DeepSpeed Ulysses" (2023). With two ranks and two heads:

    rank 0   tokens 0-2 of heads A B   ─┐                ┌─▶ tokens 0-6 of head A
                                        ├── all-to-all ──┤
    rank 1   tokens 3-6 of heads A B   ─┘                └─▶ tokens 0-6 of head B

Only elements are moved, so attention computes the same bits as in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.parallel.expert.dispatch import all_to_all


def to_heads(parts: Sequence[Tensor], lengths: Sequence[int], group: Collectives) -> list[Tensor]:
    """Return whole sequences of this rank's heads. Differentiable and collective.

    Args:
        parts: Tensors (rows, heads, own length, features) with the same rows and length. The number
            of ranks divides their numbers of heads.
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.

    Returns:
        Tensors (rows, heads / ranks, length, features), contiguous.
    """
    size, own, total = group.size, lengths[group.rank], sum(lengths)
    shapes = [(part.size(0), part.size(1) // size, part.size(3)) for part in parts]
    # (own length) rows for each receiving rank. All tensors are sent in one exchange, side by side.
    sent = torch.cat(
        [
            part.reshape(rows, size, heads, own, features)
            .permute(1, 3, 0, 2, 4)
            .reshape(size * own, rows * heads * features)
            for part, (rows, heads, features) in zip(parts, shapes, strict=True)
        ],
        dim=1,
    )
    received = all_to_all(sent, [[length] * size for length in lengths], group)
    # The sending ranks are in the order of the tokens, so the received rows are sorted.
    widths = [rows * heads * features for rows, heads, features in shapes]
    wholes = torch.split(received, widths, dim=1)
    return [
        whole.reshape(total, rows, heads, features).permute(1, 2, 0, 3).contiguous()
        for whole, (rows, heads, features) in zip(wholes, shapes, strict=True)
    ]


def to_parts(whole: Tensor, lengths: Sequence[int], group: Collectives) -> Tensor:
    """Return this rank's part of the sequences of all heads. Differentiable and collective.

    Args:
        whole: (rows, heads / ranks, length, features).
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.

    Returns:
        (rows, heads, own length, features), contiguous.
    """
    rows, heads, total, features = whole.shape
    size, own = group.size, lengths[group.rank]
    sent = whole.permute(2, 0, 1, 3).reshape(total, rows * heads * features)
    received = all_to_all(sent, [list(lengths) for _ in range(size)], group)
    parts = received.reshape(size, own, rows, heads, features)
    return parts.permute(2, 0, 3, 1, 4).reshape(rows, size * heads, own, features)


def gather_tokens(part: Tensor, lengths: Sequence[int], group: Collectives) -> Tensor:
    """Return a mask of all tokens, given this rank's part along the last dimension. Collective.

    No gradient flows back.

    Args:
        part: (..., own length).
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.
    """
    moved = part.detach().movedim(-1, 0)
    rest = moved.shape[1:]
    # Each rank sends its whole part to every rank.
    sent = moved.reshape(1, -1).expand(group.size, -1).reshape(-1, rest.numel())
    # Transports exchange numbers, not bools.
    is_bool = part.dtype == torch.bool
    received = all_to_all(
        sent.to(torch.uint8) if is_bool else sent,
        [[length] * group.size for length in lengths],
        group,
    )
    whole = received.reshape(sum(lengths), *rest).movedim(0, -1)
    return whole.bool() if is_bool else whole
