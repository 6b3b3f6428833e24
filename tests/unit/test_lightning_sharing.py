"""The shares of an evaluation: every sample once, in as many batches on all workers."""

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from shardwise.lightning.sharing import LightningShare, count_once


def batches(total, workers, size, **options):
    """Return the samples of each worker's batches."""
    found = []
    for rank in range(workers):
        sampler = DistributedSampler(range(total), LightningShare(workers), rank, shuffle=False)
        loader = count_once(DataLoader(range(total), size, sampler=sampler, **options))
        found.append([batch.tolist() for batch in loader])
        assert len(loader) == len(found[-1])
    return found


def test_shares_by_hand() -> None:
    assert batches(5, 2, 2) == [[[0, 2, 4]], [[1, 3]]]
    assert batches(5, 2, 1) == [[[0], [2, 4]], [[1], [3]]]
    assert batches(4, 2, 1) == [[[0], [2]], [[1], [3]]]
    assert batches(1, 2, 1) == [[[0]], [[0]]]  # nobody is left without a forward


@pytest.mark.parametrize("total", [5, 7, 11, 24, 25])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_sample_counts_once(total: int, workers: int, size: int) -> None:
    found = batches(total, workers, size)
    assert sorted(row for share in found for batch in share for row in batch) == list(range(total))
    assert len({len(share) for share in found}) == 1
    assert max(len(batch) for share in found for batch in share) <= size + 1


def test_samplers_of_the_script_stay() -> None:
    sampler = DistributedSampler(range(5), 2, 0, shuffle=False)
    loader = DataLoader(range(5), 2, sampler=sampler)
    assert [batch.tolist() for batch in count_once(loader)] == [[0, 2], [4]]
    assert len(list(DistributedSampler(range(5), 2, 1, shuffle=False))) == 3
