"""Storage of optimizer state in 8 bits: its map, its rounding, and that it is stable."""

import pytest
import torch

from shardwise.states.storage.quantised_storage import (
    BLOCK,
    QuantisedStorage,
    dynamic_map,
    nbytes_of,
)

CPU = torch.device("cpu")
SIGNS = pytest.mark.parametrize("signed", [True, False])


def stored(value, *, signed):
    spans = [(0, BLOCK), (BLOCK, len(value))]
    storage = QuantisedStorage(len(value), value.dtype, CPU, spans, signed=signed)
    storage.store(value)
    return storage


def values(signed, dtype=torch.float32):
    """Return blocks of very different scales, with zeros, ones and the borders of codes."""
    draw = torch.Generator().manual_seed(9)
    value = torch.randn(16, BLOCK, generator=draw, dtype=torch.float64)
    value *= torch.rand(value.shape, generator=draw, dtype=torch.float64) ** 9
    table = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    value[0], value[1, 5:] = 0, 0
    value[2, :255] = table[:255]
    value[2, 255] = 1
    value *= 10.0 ** torch.arange(-8, 8).mul(2.0).unsqueeze(1)
    return (value if signed else value.abs()).flatten().to(dtype)


def test_map_is_that_of_the_paper():
    unsigned, signed = dynamic_map(signed=False), dynamic_map(signed=True)
    assert unsigned[:3] == pytest.approx([0, 3.25e-7, 7.75e-7])
    assert unsigned[-3:] == pytest.approx([0.98945, 0.99648, 1.0], abs=1e-5)
    assert signed[128:130] == pytest.approx([5.5e-7, 3.25e-6])
    assert (len(unsigned), len(signed)) == (256, 255)
    assert unsigned == sorted(unsigned)
    assert signed == sorted(signed) == [-value for value in reversed(signed)]


@SIGNS
def test_rounds_to_the_nearest_value(signed):
    value = values(signed)
    table = torch.tensor(dynamic_map(signed=signed), dtype=torch.float32).double()
    blocks = value.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    quotients = (blocks / scale.masked_fill(scale == 0, 1)).double()
    nearest = (quotients.unsqueeze(-1) - table).abs().min(-1).values
    got = stored(value, signed=signed)
    error = (quotients - table[got.codes.long()].view_as(quotients)).abs()
    raised = torch.zeros_like(error, dtype=torch.bool)
    if not signed:  # a positive value is never rounded to 0
        raised = (quotients > 0) & (quotients < table[1] / 2)
    torch.testing.assert_close(error[~raised], nearest[~raised], rtol=0, atol=1e-9)
    assert bool(((got.loaded() == 0) == (value == 0)).all()) or signed


@SIGNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_rounded_values_changes_nothing(signed, dtype):
    first = stored(values(signed, dtype), signed=signed)
    again = stored(first.loaded(), signed=signed)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.loaded(), again.loaded())
    assert first.nbytes == nbytes_of(first.numel, dtype.itemsize) == first.memory_bytes


def test_span_is_stored_only_if_it_changed():
    storage = stored(values(True), signed=True)
    before = storage.loaded()
    storage.take(1).zero_()
    storage.put(1, changed=False)
    assert torch.equal(storage.loaded(), before)
    assert not storage.take(0, fresh=True).any()
    storage.put(0, changed=True)
    assert torch.equal(storage.loaded()[BLOCK:], before[BLOCK:])
