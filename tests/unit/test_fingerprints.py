"""Fingerprints are equal over any cut, and differ for different bits."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.layout import fingerprints
from shardwise.layout.fingerprints import Fingerprint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 100
    return (drawn > 0) if dtype == torch.bool else drawn.to(dtype)


def in_parts(whole: torch.Tensor, cuts: list[int]) -> Fingerprint:
    edges = [0, *sorted(cut % (whole.numel() + 1) for cut in cuts), whole.numel()]
    found = fingerprints.nothing()
    for first, end in reversed(list(pairwise(edges))):
        found += fingerprints.of(whole[first:end], first)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.sampled_from(DTYPES), st.lists(st.integers(0, 200), max_size=5))
def test_parts_add_up_to_the_whole_for_any_cut(
    numel: int, dtype: torch.dtype, cuts: list[int]
) -> None:
    whole = values(numel, dtype)
    one, other = fingerprints.of(whole), in_parts(whole, cuts)
    assert one.same_bits(other)
    assert one.distance(other) == 0.0
    assert one.largest == other.largest
    torch.testing.assert_close(one.sketch, other.sketch)


def test_detects_one_bit_and_one_exchange() -> None:
    whole = values(1000, torch.float32)
    bit = whole.clone()
    bit.view(torch.int32)[500] ^= 1
    exchanged = whole.clone()
    exchanged[[3, 700]] = exchanged[[700, 3]]
    for other in (bit, exchanged, -whole, whole[:-1]):
        assert not fingerprints.of(whole).same_bits(fingerprints.of(other))
    assert not fingerprints.of(torch.tensor([0.0])).same_bits(fingerprints.of(torch.tensor([-0.0])))


def test_estimates_a_difference() -> None:
    for numel in (5, 1000, 50000):
        whole = values(numel, torch.float64)
        noise = values(numel, torch.float64, seed=1) * 1e-6
        one, other = fingerprints.of(whole), fingerprints.of(whole + noise)
        assert 0.5 < one.distance(other) / float(noise.norm()) < 2.0
        assert 0.5 < one.norm / float(whole.norm()) < 2.0


def test_a_nan_is_no_small_difference() -> None:
    whole = values(10, torch.float32)
    broken = whole.clone()
    broken[3] = torch.nan
    one, other = fingerprints.of(whole), fingerprints.of(broken)
    assert one.distance(other) == float("inf")
    assert other.largest != other.largest
    assert other.same_bits(fingerprints.of(broken))


def test_complex_and_strided_tensors_count_elements_in_order() -> None:
    pairs = values(24, torch.float32).view(12, 2)
    assert fingerprints.of(torch.view_as_complex(pairs)).same_bits(fingerprints.of(pairs))
    square = values(36, torch.float32).view(6, 6)
    assert fingerprints.of(square.t()).same_bits(fingerprints.of(square.t().contiguous()))
    assert not fingerprints.of(square.t()).same_bits(fingerprints.of(square))


def test_order_of_rows_of_a_batch_does_not_count() -> None:
    rows = values(60, torch.float32).view(12, 5)
    word = fingerprints.WORD
    whole = fingerprints.unordered(rows)
    assert (fingerprints.unordered(rows[7:]) + fingerprints.unordered(rows[:7])) % word == whole
    assert fingerprints.unordered(rows.flip(0)) == whole
    assert fingerprints.unordered(rows + 1) != whole
