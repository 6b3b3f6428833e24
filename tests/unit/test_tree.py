"""The tree of the exact mode: the order of its sums, and turns as nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.layout import sum_tree
from shardwise.layout.sum_tree import MicroShards
from shardwise.states.gradients.gradient_sum import GradientSum, TreeSum
from shardwise.states.storage.storage import MemoryStorage


def joined(one, other):
    return f"({one}{other})"


@pytest.mark.parametrize(
    ("leaves", "fan_ins", "sizes", "whole"),
    [
        (1, [], [1], "a"),
        (2, [2], [1, 2], "(ab)"),
        (3, [3], [1, 3], "((ab)c)"),
        (4, [2, 2], [1, 2, 4], "((ab)(cd))"),
        (6, [2, 3], [1, 2, 6], "(((ab)(cd))(ef))"),
        (8, [2, 2, 2], [1, 2, 4, 8], "(((ab)(cd))((ef)(gh)))"),
        (9, [3, 3], [1, 3, 9], "((((ab)c)((de)f))((gh)i))"),
        (12, [2, 2, 3], [1, 2, 4, 12], "((((ab)(cd))((ef)(gh)))((ij)(kl)))"),
    ],
)
def test_the_tree(leaves, fan_ins, sizes, whole):
    assert sum_tree.fan_ins(leaves) == fan_ins
    assert sum_tree.node_sizes(leaves) == sizes
    assert sum_tree.fold("abcdefghijkl"[:leaves], joined) == whole


@st.composite
def runs(draw):
    """Draws a number of micro-shards, and a number of workers that can run them."""
    count = draw(st.integers(1, 48))
    return count, draw(st.sampled_from(sum_tree.node_sizes(count)))


@given(runs())
def test_turns_of_ranks_add_up_in_the_same_tree(run):
    """Sum across the ranks of each turn, and then over the turns, as an accumulator does."""
    count, workers = run
    draw = torch.Generator().manual_seed(count)
    leaves = list(torch.randn(count, 5, generator=draw))
    shards = [MicroShards(count, workers, rank) for rank in range(workers)]
    fan_ins = shards[0].fan_ins
    levels = [MemoryStorage(torch.empty(5)) for _ in range(max(len(fan_ins), 1))]
    sums = TreeSum(levels, fan_ins, torch.device("cpu"))
    for _ in range(2):  # two steps
        for turn in range(shards[0].turns):
            mine = [leaves[each.number(turn)] for each in shards]
            sums.add(sum_tree.fold(mine, torch.add))
        assert torch.equal(sums.total.loaded(), sum_tree.fold(leaves, torch.add))
        sums.clear()


@given(runs())
def test_every_micro_shard_is_run_once(run):
    count, workers = run
    shards = [MicroShards(count, workers, rank) for rank in range(workers)]
    found = [each.number(turn) for turn in range(shards[0].turns) for each in shards]
    assert found == list(range(count))


def test_without_a_tree_parts_are_added_in_order_of_arrival():
    sums = GradientSum(MemoryStorage(torch.zeros(1)))
    for number in range(1, 6):
        sums.add(torch.tensor([float(number)]))
    assert sums.total.loaded().tolist() == [15.0]


@pytest.mark.parametrize(
    ("count", "workers", "message"),
    [
        (
            6,
            3,
            "--exact 6 gives the same bits on 1, 2 and 6 workers, the sizes of the nodes of its "
            "tree of sums, but cannot run on 3. Start one of these numbers of workers, or use "
            "--exact 3, which runs on 3.",
        ),
        (4, 8, "on 1, 2 and 4 workers, .* cannot run on 8"),
        (1, 2, "on 1 workers"),
    ],
)
def test_refuses_number_of_workers_without_node(count, workers, message):
    with pytest.raises(ConfigError, match=message):
        MicroShards(count, workers, 0)
