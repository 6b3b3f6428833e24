"""Sorts tokens by expert, and exchanges them between the ranks that hold the experts.

No token is dropped. With two ranks, four experts and rows named by (source rank, expert):

    rank 0   00 01 02 03            ─┐                 ┌─▶ 00 01 10 11 ─▶ 00 10 | 01 11
    rank 1   10 11 12 13             ├── all-to-all ───┤
                                    ─┘                 └─▶ 02 03 12 13 ─▶ 02 12 | 03 13
             sorted by expert                              by source      by expert, then source

An expert's rows are in the order of the batch, as in a single process, so the expert sees the
same matrix. The outputs are sent back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle
from shardwise.layout.bucket_layout import Span
from shardwise.timeline import recorder


class Permute(torch.autograd.Function):
    """Reorders rows. The backward pass applies the inverse permutation, without a scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return Permute.apply(grad, inverse, order), None, None  # type: ignore[no-untyped-call]


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return `rows[order]`. `inverse` is the inverse permutation of `order`."""
    return Permute.apply(rows, order, inverse)  # type: ignore[no-any-return, no-untyped-call]


def inverse_of(order: Tensor) -> Tensor:
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def count_rows(experts: Tensor, number: int) -> Tensor:
    """Return how often each of `number` experts occurs in `experts` (n,): (number,) int64.

    Entries equal to `number` are ignored.
    """
    # Not bincount, which makes the host wait for an accelerator.
    counts = experts.new_zeros(number + 1)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))[:number]


@dataclass(frozen=True)
class TokenCopies:
    """The k copies of each token that are sent to experts, sorted by expert.

    Args:
        order: (T k,) int64, the copies in sorted order. Padding is last.
        inverse: (T k,) int64, the inverse permutation.
        top_k: The number of copies of each token.
    """

    order: Tensor
    inverse: Tensor
    top_k: int

    @classmethod
    def sorted(cls, experts: Tensor) -> TokenCopies:
        """Sort copies by `experts` (T, k) int64. Numbers above the last expert's mark padding."""
        # Stable, so that the rows of an expert stay in the order of the batch.
        order = torch.argsort(experts.reshape(-1), stable=True)
        return cls(order, inverse_of(order), experts.shape[1])

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the copies (T k, D) of `tokens` (T, D), sorted by expert."""
        copies = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        return permuted(copies, self.order, self.inverse)

    def combined(self, outputs: Tensor, gates: Tensor) -> Tensor:
        """Return each token's sum of `outputs` (n, D), weighted by `gates` (T, k), as (T, D).

        `outputs` are those of the first n copies. The others count as 0.
        """
        rest = self.order.numel() - outputs.shape[0]
        if rest:
            outputs = torch.cat([outputs, outputs.new_zeros(rest, outputs.shape[1])])
        by_token = permuted(outputs, self.inverse, self.order)
        return weighted_sum(by_token.view(-1, self.top_k, outputs.shape[1]), gates)


@dataclass(frozen=True)
class Tally:
    """How the tokens of a forward pass are divided among experts.

    Args:
        copies: The copies of this rank's tokens.
        table: For each rank that exchanges tokens, its number of rows for each expert.
        own: The row of this rank.
        valid: (T,) bool, False for padding, or None if there is none.
        everyone: The sum of the counts of all ranks that share router losses, followed by their
            number of valid tokens.
        seeds: In exact mode, a random number of each rank in the table.
    """

    copies: TokenCopies
    table: list[list[int]]
    own: list[int]
    valid: Tensor | None = None
    everyone: Sequence[int] = ()
    seeds: list[int] | None = None


def weighted_sum(outputs: Tensor, gates: Tensor) -> Tensor:
    """Return the sum of `outputs` (T, k, D), weighted by `gates` (T, k), as (T, D)."""
    weighted = outputs * gates.unsqueeze(-1)
    total = weighted[:, 0]
    # A loop fixes the order, which `sum` may choose by shape.
    for slot in range(1, weighted.shape[1]):
        total = total + weighted[:, slot]
    return total


class _AllToAll(torch.autograd.Function):
    """Sends `counts[a][b]` rows from rank a to rank b, and their gradients from b to a."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        counts: list[list[int]],
        group: Collectives,
        pending: list[Handle] | None,
        row: recorder.Row,
    ) -> Tensor:
        ctx.args = [list(column) for column in zip(*counts, strict=True)], group, row
        received, handle = _start(rows, counts, group, row)
        if pending is None:
            handle.wait()
        else:
            pending.append(handle)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        counts, group, row = ctx.args
        sent: Tensor = _AllToAll.apply(grad, counts, group, None, row)  # type: ignore[no-untyped-call]
        return sent, None, None, None, None


def _start(
    rows: Tensor, counts: list[list[int]], group: Collectives, row: recorder.Row
) -> tuple[Tensor, Handle]:
    """Start an exchange of `rows` (n, D). Return the receive buffer and the handle to wait for."""
    width = rows.shape[1:].numel()
    number = sum(row[group.rank] for row in counts)
    # The transport may write after this call, in any grad mode, so autograd must not know its
    # tensor. `set_` shares the memory without making a view.
    memory = rows.new_empty(number * width)
    received = rows.new_empty(0).set_(memory).view(number, *rows.shape[1:])  # type: ignore[call-overload]
    # Python integers, so the numbers of elements cannot overflow.
    elements = [[count * width for count in row] for row in counts]
    sent = rows.detach().contiguous().view(-1)
    launched = recorder.launched("all-to-all", sent, row=row)
    handle = group.all_to_all(sent, elements, memory).noted(launched)

    def finish() -> None:
        handle.wait()
        # The transport may still read `sent`, which autograd frees after this call.
        handle.reusable()
        del sent_until_here[:]

    sent_until_here = [sent]
    return received, Handle(finish)


def all_to_all(
    rows: Tensor,
    counts: list[list[int]],
    group: Collectives,
    pending: list[Handle] | None = None,
    row: recorder.Row = recorder.Row.COMMUNICATION,
) -> Tensor:
    """Exchange rows between ranks. Differentiable. Collective, even for a rank without rows.

    Args:
        rows: (n, D), in the order of the receiving ranks.
        counts: `counts[a][b]` is the number of rows that rank a sends to rank b, the same on all
            ranks.
        group: The ranks.
        pending: If given, the function returns while the exchange is running, and appends the
            exchange's handle. Do not read the result before the handle's `wait` has returned.
        row: The timeline's row that shows the exchange and its backward pass.

    Returns:
        The rows for this rank, in the order of the sending ranks.
    """
    return _AllToAll.apply(rows, counts, group, pending, row)  # type: ignore[no-any-return, no-untyped-call]


class Exchange:
    """Sends one forward pass's rows to the ranks that hold their experts, and returns the outputs.

    Args:
        counts: For each rank of `group`, its number of rows for each expert.
        spans: For each rank of `group`, the experts [first, end) that it holds.
        group: The ranks that together hold every expert once.
    """

    def __init__(
        self, counts: Sequence[Sequence[int]], spans: Sequence[Span], group: Collectives
    ) -> None:
        self._group = group
        self._rows = [[sum(row[first:end]) for first, end in spans] for row in counts]
        self.number_sent = sum(counts[group.rank])
        """Number of this rank's rows."""
        first, end = spans[group.rank]
        self.sizes_by_source = [list(row[first:end]) for row in counts]
        """For each source rank, the number of rows of each of this rank's experts."""
        self.sizes = [sum(column) for column in zip(*self.sizes_by_source, strict=True)]
        """Number of rows of each of this rank's experts."""

    def to_experts(self, rows: Tensor, pending: list[Handle] | None) -> Tensor:
        """Send `rows` (n, D), sorted by expert. Return the rows that this rank receives.

        If `pending` is a list, wait for the handles in it before you read the result.
        """
        return all_to_all(rows, self._rows, self._group, pending)

    def by_expert(self, received: Tensor) -> list[list[Tensor]]:
        """Return the `received` rows of each expert, as one view for each source rank."""
        blocks = torch.split(received, [size for row in self.sizes_by_source for size in row])
        number = len(self.sizes)
        return [list(blocks[expert::number]) for expert in range(number)]

    def by_source(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the experts' `outputs` sorted by source rank, as the rows were received.

        The rows of each expert are sorted by source rank.
        """
        sizes = map(list, zip(*self.sizes_by_source, strict=True))
        blocks = [torch.split(each, size) for each, size in zip(outputs, sizes, strict=True)]
        return torch.cat([block for source in zip(*blocks, strict=True) for block in source])

    def back(self, outputs: Tensor) -> Tensor:
        """Send `outputs` (m, D), sorted by source rank, to these ranks.

        Returns the outputs for this rank's rows, in the order of the rows.
        """
        transposed = [list(column) for column in zip(*self._rows, strict=True)]
        return all_to_all(outputs, transposed, self._group)
