from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from shardwise.comm import Handle
from shardwise.states.storage.nf4_storage import (
    BLOCK,
    VALUES,
    ExpandingGather,
    NF4Storage,
    nbytes_of,
    pack,
)
from shardwise.states.storage.storage import SPAN


def nearest(blocks):
    """The nearest of the 16 values to each quotient, times the block's scale, in fp64."""
    scales = blocks.abs().amax(1, keepdim=True)
    quotients = blocks / torch.where(scales == 0, 1, scales)
    values = torch.tensor(VALUES, dtype=torch.float64)
    return values[(quotients.unsqueeze(2) - values).abs().argmin(2)] * scales


def test_values_are_the_quantiles_that_qlora_describes():
    # Dettmers et al. 2023: 8 positive and 7 negative quantiles between 0.5 and this offset, and 0.
    offset, normal = 0.9677083, NormalDist()
    positive = [normal.inv_cdf(offset + (0.5 - offset) * n / 8) for n in range(8)]
    negative = [-normal.inv_cdf(offset + (0.5 - offset) * n / 7) for n in range(7)]
    expected = sorted([*negative, 0.0, *positive])
    assert [value / max(expected) for value in expected] == pytest.approx(VALUES, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounds_each_element_to_the_nearest_value_of_its_block(dtype):
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randn(500, BLOCK, generator=draw, dtype=torch.float64)
    blocks *= torch.logspace(-3, 3, 500, dtype=torch.float64).unsqueeze(1)
    blocks[7] = 0
    blocks = blocks.to(dtype)
    storage = NF4Storage(blocks.numel(), dtype, torch.device("cpu"))
    storage.store(blocks.view(-1))
    loaded = storage.loaded()
    torch.testing.assert_close(
        loaded.double().view(-1, BLOCK), nearest(blocks.double()).to(dtype).double()
    )
    # What a checkpoint stores restores the same codes.
    codes, scales = storage.codes.clone(), storage.scales.clone()
    storage.store(loaded)
    assert torch.equal(storage.codes, codes)
    assert torch.equal(storage.scales, scales)
    assert storage.memory_bytes == nbytes_of(blocks.numel(), dtype.itemsize)
    held = codes.nbytes + scales.nbytes
    assert storage.nbytes == held == blocks.numel() * (4 + dtype.itemsize * 8 / BLOCK) / 8


def test_writes_one_span_and_keeps_the_others():
    numel = SPAN + 3 * BLOCK
    storage = NF4Storage(numel, torch.float32, torch.device("cpu"))
    storage.store(torch.linspace(-1, 1, numel))
    before = storage.loaded()
    storage.take(1, fresh=True).fill_(2)
    storage.put(1, changed=True)
    after = storage.loaded()
    assert torch.equal(after[:SPAN], before[:SPAN])
    assert torch.equal(after[SPAN:], torch.full((3 * BLOCK,), 2.0))
    assert [first for first, _ in storage.read_spans()] == [0, SPAN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [[0, 192, 384], [0, 0, 320, 384], [0, 384, 384]])
def test_packed_gather_expands_every_ranks_interval(dtype, cuts):
    value = torch.randn(cuts[-1], generator=torch.Generator().manual_seed(1)).to(dtype)
    buffers, edges, expected = [], [], torch.empty_like(value)
    for rank, (first, end) in enumerate(pairwise(cuts)):
        storage = NF4Storage(end - first, dtype, torch.device("cpu"))
        storage.store(value[first:end])
        expected[first:end] = storage.loaded()
        packed, edges = pack(storage, cuts, rank)
        assert edges[rank + 1] - edges[rank] == storage.nbytes
        buffers.append(packed)

    def gather():
        for rank, (first, end) in enumerate(pairwise(edges)):
            buffers[0][first:end] = buffers[rank][first:end]

    result = torch.full_like(value, torch.nan)
    handle = ExpandingGather(Handle(gather), buffers[0], edges, cuts, result)
    assert not handle.is_there()
    handle.wait()
    assert torch.equal(result, expected)
    result.zero_()  # a second wait must not write into a buffer that is in use again
    handle.reusable()
    assert not result.any()
