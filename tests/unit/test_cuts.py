"""How a global batch is divided into micro-shards of the exact mode, and their reading order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from shardwise import config
from shardwise.data import Loader
from shardwise.data.batch_cuts import MicroShardCut, ShareCut
from shardwise.errors import DataError, UsageError
from shardwise.layout.sum_tree import MicroShards, node_sizes


@pytest.mark.parametrize(
    ("rows", "count", "workers", "parts"),
    [
        (8, 4, 1, [[(0, 2), (2, 4), (4, 6), (6, 8)]]),
        (8, 4, 2, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (8, 4, 4, [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]),
        (5, 4, 2, [[(0, 1), (2, 3)], [(1, 2), (3, 5)]]),
        (1, 2, 2, [[(0, 0)], [(0, 1)]]),
    ],
)
def test_the_cut(rows, count, workers, parts):
    cuts = [MicroShardCut(MicroShards(count, workers, rank)) for rank in range(workers)]
    assert [cut.parts(rows) for cut in cuts] == parts
    assert {cut.count(rows) for cut in cuts} == {len(parts[0])}


@given(st.integers(1, 60), st.integers(1, 7), st.none() | st.integers(1, 9))
def test_rows_of_all_ranks_by_micro_batch(rows, size, micro):
    cuts = [ShareCut(size, rank, micro, rows) for rank in range(size)]
    sizes = [[end - first for first, end in cut.parts(rows)] for cut in cuts]
    assert cuts[0].total_rows(rows) == [sum(part) for part in zip(*sizes, strict=True)]


@pytest.mark.parametrize(("workers", "totals"), [(1, [1, 1, 1, 2]), (2, [2, 3]), (4, [5])])
def test_rows_of_all_ranks_by_turn(workers, totals):
    assert MicroShardCut(MicroShards(4, workers, 0)).total_rows(5) == totals


@given(st.integers(1, 60), st.integers(1, 24), st.data())
def test_micro_shards_are_the_same_on_any_number_of_workers(rows, count, data):
    workers = data.draw(st.sampled_from(node_sizes(count)))
    found = {}
    for rank in range(workers):
        cut = MicroShardCut(MicroShards(count, workers, rank))
        found |= {cut.number(turn): part for turn, part in enumerate(cut.parts(rows))}
    alone = MicroShardCut(MicroShards(count, 1, 0)).parts(rows)
    assert [found[number] for number in range(count)] == alone
    assert [row for first, end in alone for row in range(first, end)] == list(range(rows))


@pytest.fixture
def exact(solo):
    """A world of one rank in the exact mode, with 4 micro-shards."""
    solo.settings = config.Settings(exact=4)
    return solo


def test_step_has_its_micro_shards(exact):
    loader = Loader(TensorDataset(torch.arange(10)), 8)
    steps = [[batch[0].tolist() for batch in step] for step in loader.steps()]
    assert steps == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 8], [8], [8, 8], [9]]]


def test_plain_iteration_says_what_to_write(exact):
    loader = Loader(TensorDataset(torch.arange(10)), 8)
    with pytest.raises(UsageError, match=r"has 4 micro-batches\. Write `for step in loader.steps"):
        next(iter(loader))


class Numbers(IterableDataset):
    """A stream that the dataset can also shard."""

    def __iter__(self):
        yield from range(10)

    def shard(self, num_shards, index):
        raise AssertionError("shards depend on the number of workers")


def drawing(rows):
    return [*rows, torch.rand(()).item()]


def test_a_stream_is_sliced_and_draws_by_micro_shard(exact):
    loader = Loader(Numbers(), 8, collate_fn=drawing)
    steps = [list(step) for step in loader.steps()]
    assert [[batch[:-1] for batch in step] for step in steps] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 8], [8], [8, 8], [9]],
    ]
    draws = [batch[-1] for step in steps for batch in step]
    assert len(set(draws)) == 8
    assert [MicroShardCut(MicroShards(4, 2, 1)).number(request) for request in range(4)] == [
        1,
        3,
        5,
        7,
    ]


def test_refuses_batches_that_cannot_be_cut(exact):
    with pytest.raises(DataError, match="batch_size=3 cannot be cut into the 4 micro-shards"):
        Loader(TensorDataset(torch.arange(10)), 3)
    with pytest.raises(DataError, match='sharding="dataset" each worker reads a separate part'):
        Loader(Numbers(), 8, sharding="dataset")
    with pytest.raises(UsageError, match=r"world\.share returns one contiguous share"):
        exact.share(torch.arange(4))
