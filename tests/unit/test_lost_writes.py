"""Sums of the bits of a tensor, by which a write is noticed that nobody keeps."""

import pytest
import torch

from shardwise.states.parameters.lost_writes import CHUNK, integers, total


@pytest.mark.parametrize("numel", [1, CHUNK, 2 * CHUNK + 3])
def test_a_sum_by_chunks_is_that_of_all(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    assert int(total(values)) == int(integers(values).sum())
    before = int(total(values))
    values[-1] += 1
    assert int(total(values)) != before
