"""Wire formats of differences: bytes, rounding, and error feedback."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.outer_optimizer import BLOCK
from shardwise.islands.wire import Wire

DTYPES = (torch.float32, torch.float64)
SIZES = (0, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def there_and_back(name: str, values: torch.Tensor) -> torch.Tensor:
    wire = Wire(name)
    packed = wire.pack(values)
    assert packed.dtype == torch.uint8
    assert packed.shape == (wire.nbytes(values.numel(), values.dtype),)
    return wire.unpack(packed, values.numel(), values.dtype)


@pytest.mark.parametrize(
    ("name", "numel", "dtype", "nbytes"),
    [
        ("fp32", 3, torch.float32, 16),
        ("fp32", 3, torch.float64, 24),
        ("bf16", 8, torch.float64, 16),
        ("int8", 256, torch.float32, 264),
        ("int8", 257, torch.float64, 272),
        ("int4", 256, torch.float32, 136),
        ("int4", 255, torch.float32, 136),
        ("int4", 512, torch.float32, 264),
        ("int4", 0, torch.float32, 0),
    ],
)
def test_bytes(name, numel, dtype, nbytes):
    assert Wire(name).nbytes(numel, dtype) == nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_fp32_is_lossless(numel, dtype):
    values = torch.randn(numel, dtype=dtype)
    assert torch.equal(there_and_back("fp32", values), values)
    assert not Wire("fp32").loses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
def test_block_formats_round_within_half_a_scale(name, most, numel, dtype):
    torch.manual_seed(numel)
    values = torch.randn(numel, dtype=dtype) * torch.logspace(-3, 3, numel, dtype=dtype)
    back = there_and_back(name, values)
    for first in range(0, numel, BLOCK):
        block, theirs = values[first : first + BLOCK], back[first : first + BLOCK]
        half = block.abs().max() / most / 2
        assert (block - theirs).abs().max() <= half * (1 + 1e-5)
    assert torch.equal(there_and_back(name, torch.zeros(numel, dtype=dtype)), values * 0)


def test_bf16_rounds():
    values = torch.randn(77)
    assert torch.equal(there_and_back("bf16", values), values.bfloat16().float())


def test_int4_stores_two_codes_per_byte():
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, -2.0])  # the scale is 1
    packed = Wire("int4").pack(values)
    assert packed[:4].view(torch.float32).item() == 1.0
    assert packed[4:7].tolist() == [0x97, 0x01, 0x0E]
    assert there_and_back("int4", values).tolist() == values.tolist()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_refuses_values_that_are_not_finite(name, bad):
    values = torch.ones(300)
    values[280] = bad
    with pytest.raises(ValueError, match="a NaN or an infinity"):
        Wire(name).pack(values)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_refuses_values_beyond_the_scale(name):
    with pytest.raises(ValueError, match=f"a value too large for {name}"):
        Wire(name).pack(torch.full((3,), 1e300, dtype=torch.float64))


def test_refuses_values_that_bf16_rounds_to_infinity():
    with pytest.raises(ValueError, match="a value too large for bf16"):
        Wire("bf16").pack(torch.tensor([1.0, torch.finfo(torch.float32).max]))


def test_only_the_smallest_values_are_lost():
    values = torch.tensor([1e-45, 0.0, -1e-45])
    back = there_and_back("int8", values)
    assert (back - values).abs().max() <= 1e-45


@given(st.lists(st.floats(-1e6, 1e6), max_size=600), st.sampled_from(["int8", "int4", "bf16"]))
def test_error_feedback_sends_losses_later(numbers, name):
    """Error feedback: the sum of many messages differs from the sum of values by one rounding."""
    values, wire = torch.tensor(numbers, dtype=torch.float64), Wire(name)
    residual, came = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(4):
        sent = values + residual
        back = wire.unpack(wire.pack(sent), sent.numel(), sent.dtype)
        residual = sent - back
        came += back
    assert torch.allclose(came + residual, 4 * values, rtol=1e-9, atol=1e-6)
    if numbers:
        assert residual.abs().max() <= values.abs().max() / 4 + 1e-9
