"""Sums of a tensor's bits, which detect lost writes."""

import pytest
import torch

from shardwise.states.parameters.lost_writes import CHUNK, integers, total


@pytest.mark.parametrize("numel", [1, CHUNK, 2 * CHUNK + 3])
def test_sum_in_chunks_equals_the_whole_sum(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    assert int(total(values)) == int(integers(values).sum())
    before = int(total(values))
    values[-1] += 1
    assert int(total(values)) != before
