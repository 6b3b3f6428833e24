"""Hybrid sharding with a transport that requires the same order of calls on all ranks."""

import pytest
import torch
from torch import Tensor

from shardwise.comm.base import PLAIN, Handle, Solo, Sum
from shardwise.comm.hybrid_shard import HybridShard


class Recorded(Solo):
    """A group whose all-reduce makes two calls. `advance` makes the second one."""

    def __init__(self, *, in_one_order: bool) -> None:
        super().__init__()
        self.in_one_order = in_one_order
        self.calls: list[str] = []
        self._sums = 0

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        number, self._sums = self._sums, self._sums + 1
        self.calls.append(f"scatter {number}")
        return Handle(None, lambda: self.calls.append(f"gather {number}"))


@pytest.mark.parametrize("in_one_order", [True, False])
def test_a_rank_that_settles_late_makes_the_same_calls(in_one_order: bool) -> None:
    """One rank settles its first sum before the second is made between hosts, another after."""
    made = []
    for early in (True, False):
        between = Recorded(in_one_order=in_one_order)
        group = HybridShard(Solo(), between)
        first, second = (group.all_reduce(torch.ones(4)) for _ in range(2))
        first.advance()
        if early:
            first.wait()
        second.advance()
        first.wait()
        second.wait()
        made.append(between.calls)
    assert (made[0] == made[1]) == in_one_order
