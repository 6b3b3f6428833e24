"""The compiler keeps exchanges of tokens in the order of the program."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.parallel.context import attention
from shardwise.parallel.context.compiled_exchange import traced_group
from shardwise.parallel.context.methods import AttentionCall, CausalBiases, attend
from shardwise.parallel.expert import dispatch
from shardwise.parallel.tensor import compiled_collectives

LENGTHS, ROWS, HEADS, FEATURES = [4, 5], 3, 4, 2


class Exchange(torch.autograd.Function):
    """Notes the counts of an exchange, also of the one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Any, rank: int, exchanges: Any) -> Tensor:
        ctx.arguments = counts, rank, exchanges
        exchanges.append([list(row) for row in counts])
        return rows.new_ones(sum(row[rank] for row in counts), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        counts, rank, exchanges = ctx.arguments
        back = [list(column) for column in zip(*counts, strict=True)]
        return Exchange.apply(grad, back, rank, exchanges), None, None, None  # type: ignore[no-untyped-call]


def exchanges_of(rank: int, backend: str | None) -> list[list[list[int]]]:
    """Compile gathered attention of one rank. Return the counts of its exchanges, in order.

    Without a backend, attention runs eagerly.
    """
    exchanges = []

    def exchanged(rows: Tensor, counts: list[list[int]], group: Any, **options: Any) -> Tensor:
        return Exchange.apply(rows, counts, rank, exchanges)  # type: ignore[no-any-return, no-untyped-call]

    stand_in: Any = mock.Mock(rank=rank, size=len(LENGTHS))
    group = stand_in if backend is None else traced_group(stand_in)
    linear = nn.Linear(HEADS * FEATURES, 3 * HEADS * FEATURES).double()

    def attend_to(x: Tensor) -> Tensor:
        shape = ROWS, LENGTHS[rank], HEADS, FEATURES
        query, key, value = (each.view(shape).transpose(1, 2) for each in linear(x).chunk(3, -1))
        call = AttentionCall(
            query, key, value, None, 0.0, True, None, F.scaled_dot_product_attention
        )
        return attend(call, LENGTHS, group, "gathered", CausalBiases())

    torch._dynamo.reset()
    x = torch.randn(ROWS, LENGTHS[rank], HEADS * FEATURES, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(dispatch, "all_to_all", exchanged):
        compiled = attend_to if backend is None else torch.compile(attend_to, backend=backend)
        compiled(x).sum().backward()
    return exchanges


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_inductor_runs_exchanges_in_the_order_of_the_program(rank):
    """The gather of keys and the spread of queries do not depend on each other."""
    with warnings.catch_warnings():
        # Inductor imports a module that uses it.
        warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
        compiled_collectives.keep_order_in_inductor()
        # A cached graph may have been compiled by a version that did not keep the order.
        with torch._inductor.config.patch(fx_graph_cache=False):
            assert exchanges_of(rank, "inductor") == exchanges_of(rank, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_aot_runs_exchanges_in_the_order_of_eager_code(rank):
    exchanges = exchanges_of(rank, None)
    # Keys and values together, queries and results, also in the backward pass.
    assert len(exchanges) == 6
    assert exchanges_of(rank, "aot_eager") == exchanges


def test_planned_modules_exchange_nothing_in_a_graph():
    """Dynamo compiles a planned module by itself, between two graphs of its unit."""
    group: Any = mock.Mock(rank=0, size=2)
    run = attention.ContextRun(group, mock.Mock(), "auto")
    query = torch.randn(4, 2, 6, 4)  # a window of 6 of 12 tokens, as long as the part of a rank

    def forward() -> Tensor:
        tracing = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
        with run.inside_heads(), tracing:
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    expected = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    unit = attention.compiler_of(lambda unit, forward: forward, run)(nn.Identity(), forward)
    run.install()
    run.enter([6, 6])
    try:
        with mock.patch.object(attention, "attend") as exchanges:
            assert torch.equal(unit(), expected)
    finally:
        run.leave()
        run.uninstall()
    exchanges.assert_not_called()
