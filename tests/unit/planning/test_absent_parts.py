"""A context group of which only the first rank exists."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.parallel.context.token_exchange import gather, to_heads
from shardwise.tools.plan.engine_parts import AbsentParts


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ([[0, 1, 2], [0, 1, 2]], [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),  # positions
        ([[1, 1, 1], [1, 1, 0]], [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]]),  # padding
        ([[7, 3, 9], [4, 4, 0]], [[7, 3, 9, 7, 3, 9], [4, 4, 0, 4, 4, 0]]),  # tokens
    ],
)
def test_continues_positions_and_repeats_other_values(
    part: list[list[int]], whole: list[list[int]]
) -> None:
    group = AbsentParts(2, lambda _: None)
    assert gather(torch.tensor(part), 1, [3, 3], group).tolist() == whole


def test_counts_the_bytes_of_fake_tensors() -> None:
    noted: list[int] = []
    with FakeTensorMode():
        query, key = torch.empty(2, 8, 5, 4), torch.empty(2, 4, 5, 4)
        q, k = to_heads([query, key], [5, 5], AbsentParts(2, noted.append))
    assert (tuple(q.shape), tuple(k.shape)) == ((2, 4, 10, 4), (2, 2, 10, 4))
    assert noted == [4 * (query.numel() + key.numel())]


def test_all_ranks_pass_the_same_values() -> None:
    assert AbsentParts(3, lambda _: None).gather_plain([1, "a"]) == [[1, "a"]] * 3
