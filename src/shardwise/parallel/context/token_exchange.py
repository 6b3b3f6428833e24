"""Moves parts of sequences between the ranks of a context group.

Ranks trade parts of sequences for heads: afterwards, each rank has full sequences for its heads.
The method is from Jacobs et al., "DeepSpeed Ulysses" (2023). With two ranks and two heads:

    rank 0   tokens 0-2 of heads A B   ─┐                ┌─▶ tokens 0-6 of head A
                                        ├── all-to-all ──┤
    rank 1   tokens 3-6 of heads A B   ─┘                └─▶ tokens 0-6 of head B

Elements are only moved, so attention is bit-identical to that of a single process. `gather` and
`CausalShares` serve the "gathered" method, in which each rank has all heads for its queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import even_cuts
from shardwise.parallel.context.compiled_exchange import Group, all_to_all


def to_heads(parts: Sequence[Tensor], lengths: Sequence[int], group: Group) -> list[Tensor]:
    """Return the full sequences for this rank's heads. Differentiable and collective.

    Args:
        parts: Tensors (rows, heads, own length, features) with the same rows and length. Each
            tensor's number of heads is a multiple of the number of ranks.
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


def to_parts(whole: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
    """Return this rank's part of the sequences, for all heads. Differentiable and collective.

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


def gather(part: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    """Gather the ranks' parts along `dim` into full sequences. Differentiable and collective.

    The gradient of a part is summed over all ranks.

    Args:
        part: This rank's part.
        dim: The sequence dimension.
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.
    """
    moved = part.movedim(dim, 0)
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
    whole = received.reshape(sum(lengths), *rest).movedim(0, dim)
    return whole.bool() if is_bool else whole


class CausalShares:
    """Redistributes the queries of causal attention, so that all ranks compute equally many scores.

    Sequences are divided into two chunks per rank. With c ranks, rank r computes chunks r and
    2c-1-r, as in Megatron. For example, with two ranks:

        rank 0 has   chunks 0 1           ─▶ computes 0 3    1 + 4 parts of the scores
        rank 1 has         chunks 2 3     ─▶ computes 1 2    2 + 3 parts

    Only queries and results are moved, so the model still sees contiguous parts.

    Args:
        lengths: The length of each rank's part.
        group: The ranks, in the order of the parts.
    """

    def __init__(self, lengths: Sequence[int], group: Group) -> None:
        self._group, size = group, group.size
        self._cuts = even_cuts(sum(lengths), 2 * size)
        counts = [[0] * size for _ in range(size)]
        for chunk in range(2 * size):
            # Chunks 2r and 2r+1 are rank r's part, because even cuts of c and of 2c ranks match.
            counts[chunk // 2][self._computing(chunk)] += self._length(chunk)
        self._counts = counts
        own = 2 * group.rank, 2 * group.rank + 1
        # Chunks are sent in the order of the ranks that compute them.
        self._sent = sorted(own, key=lambda chunk: (self._computing(chunk), chunk))
        self.chunks = [
            (self._cuts[chunk], self._cuts[chunk + 1])
            for chunk in (group.rank, 2 * size - 1 - group.rank)
        ]
        """The range [first, end) of tokens of each chunk that this rank computes."""

    def _computing(self, chunk: int) -> int:
        return min(chunk, 2 * self._group.size - 1 - chunk)

    def _length(self, chunk: int) -> int:
        return self._cuts[chunk + 1] - self._cuts[chunk]

    def spread(self, query: Tensor) -> list[Tensor]:
        """Send the queries of each part to the ranks that compute them. Collective.

        Args:
            query: (rows, heads, own length, features), the queries of this rank's part.

        Returns:
            The queries of this rank's `chunks`.
        """
        rows, heads, _, features = query.shape
        first = self._length(2 * self._group.rank)
        sent = query.permute(2, 0, 1, 3).flatten(1)  # (own length, rows * heads * features)
        if self._sent[0] % 2:
            sent = torch.cat([sent[first:], sent[:first]])
        received = all_to_all(sent, self._counts, self._group)
        chunks = received.view(-1, rows, heads, features).permute(1, 2, 0, 3)
        return list(torch.split(chunks, [end - begin for begin, end in self.chunks], 2))

    def collect(self, results: Sequence[Tensor]) -> Tensor:
        """Send the results of the `chunks` to the ranks whose part they belong to. Collective.

        Args:
            results: (rows, heads, chunk length, features) for each of this rank's `chunks`.

        Returns:
            (rows, heads, own length, features), the results of this rank's part.
        """
        rows, heads, _, features = results[0].shape
        sent = torch.cat([each.permute(2, 0, 1, 3).flatten(1) for each in results])
        counts = [list(column) for column in zip(*self._counts, strict=True)]
        part = all_to_all(sent, counts, self._group)
        if self._sent[0] % 2:
            first = self._length(self._sent[0])
            part = torch.cat([part[first:], part[:first]])
        return part.view(-1, rows, heads, features).permute(1, 2, 0, 3).contiguous()
