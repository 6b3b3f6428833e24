"""The exchange of tokens as an operator that torch.compile keeps in a graph.

The compiler traces attention on parts of sequences (methods.py) with a TracedGroup instead of the
group, so that its exchanges become operators of `torch.library`. As with split layers
(compiled_collectives.py), the compiler keeps them in the order of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.parallel.expert import dispatch
from shardwise.parallel.tensor import compiled_collectives
from shardwise.timeline.recorder import Row


@dataclass(frozen=True)
class TracedGroup:
    """Stands for a group while a compiled unit is traced.

    `number` stands for the group in operators (compiled_collectives.py).
    """

    number: int
    rank: int
    size: int


Group = Collectives | TracedGroup
"""The ranks that exchange tokens: in eager code, or in a trace."""


def traced_group(group: Collectives) -> TracedGroup:
    """Define the operator, and return what stands for `group` in a trace."""
    number = compiled_collectives.number_of(group)
    if not hasattr(torch.ops.shardwise, "all_to_all"):
        exchange = torch.library.custom_op("shardwise::all_to_all", _all_to_all, mutates_args=())
        exchange.register_fake(_received_shape)
        exchange.register_autograd(_exchange_back, setup_context=_keep_arguments)
        compiled_collectives.keep_order(exchange)
    return TracedGroup(number, group.rank, group.size)


def all_to_all(rows: Tensor, counts: Sequence[Sequence[int]], group: Group) -> Tensor:
    """Exchange rows between ranks, as `dispatch.all_to_all`, also in a trace."""
    if not isinstance(group, TracedGroup):
        return dispatch.all_to_all(rows, [*map(list, counts)], group, row=Row.ATTENTION)
    flat = [count for row in counts for count in row]
    # The rank selects the received rows in a trace. As an argument of the operator it also prevents
    # ranks from sharing graphs in torch's cache on disk.
    return torch.ops.shardwise.all_to_all(rows, flat, group.number, group.rank)  # type: ignore[no-any-return]


def _all_to_all(rows: Tensor, counts: Sequence[int], number: int, rank: int) -> Tensor:
    del rank
    group = compiled_collectives.group_of(number)
    table = [list(counts[i : i + group.size]) for i in range(0, len(counts), group.size)]
    return dispatch.all_to_all(rows, table, group, row=Row.ATTENTION)


def _received_shape(rows: Tensor, counts: Sequence[int], number: int, rank: int) -> Tensor:
    del number
    size = round(len(counts) ** 0.5)
    return rows.new_empty(sum(counts[rank::size]), *rows.shape[1:])


def _keep_arguments(ctx: Any, inputs: Any, output: Tensor) -> None:
    del output
    ctx.arguments = inputs[1:]


def _exchange_back(ctx: Any, grad: Tensor) -> Any:
    counts, number, rank = ctx.arguments
    size = round(len(counts) ** 0.5)
    back = [counts[b * size + a] for a in range(size) for b in range(size)]
    return torch.ops.shardwise.all_to_all(grad, back, number, rank), None, None, None
