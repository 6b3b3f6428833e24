"""The compiler keeps exchanges of tokens in the order of the program."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.parallel.context.compiled_exchange import traced_group
from shardwise.parallel.context.methods import AttentionCall, CausalBiases, attend
from shardwise.parallel.expert import dispatch
from shardwise.parallel.tensor import compiled_collectives

LENGTHS, ROWS, HEADS, FEATURES = [4, 5], 3, 4, 2


def exchanges_of(rank: int, backend: str) -> list[list[list[int]]]:
    """Compile gathered attention of one rank. Return the counts of its exchanges, in order."""
    exchanges = []

    def exchanged(rows: Tensor, counts: list[list[int]], group: Any, **options: Any) -> Tensor:
        exchanges.append(counts)
        return rows.new_ones(sum(row[rank] for row in counts), *rows.shape[1:])

    stand_in: Any = mock.Mock(rank=rank, size=len(LENGTHS))
    group = traced_group(stand_in)
    linear = nn.Linear(HEADS * FEATURES, 3 * HEADS * FEATURES).double()

    def attention(x: Tensor) -> Tensor:
        shape = ROWS, LENGTHS[rank], HEADS, FEATURES
        query, key, value = (each.view(shape).transpose(1, 2) for each in linear(x).chunk(3, -1))
        call = AttentionCall(
            query, key, value, None, 0.0, True, None, F.scaled_dot_product_attention
        )
        return attend(call, LENGTHS, group, "gathered", CausalBiases())

    torch._dynamo.reset()
    x = torch.randn(ROWS, LENGTHS[rank], HEADS * FEATURES, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(dispatch, "all_to_all", exchanged):
        torch.compile(attention, backend=backend)(x).sum().backward()
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
            assert exchanges_of(rank, "inductor") == exchanges_of(rank, "aot_eager")
