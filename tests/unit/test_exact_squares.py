"""Sums of squares whose bits do not depend on buckets, intervals, tiers or ranks."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.states.storage.squared_sums import GRAIN, exact_row, exact_total
from shardwise.states.storage.storage import MemoryStorage

GRAINS = 40


def numbers(seed, dtype=torch.float32):
    """Values of very different size, so that most orders of addition round differently."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.randint(-20, 20, (GRAINS * GRAIN,), generator=draw).double().exp2()
    return (torch.randn(GRAINS * GRAIN, generator=draw).double() * scale).to(dtype)


def row_of(values, span=None):
    return exact_row(MemoryStorage(values), span or (0, values.numel()))


def total_of(*rows):
    return exact_total([row.double().tolist() for row in rows])


@given(st.integers(0, 10**6), st.lists(st.integers(0, GRAINS), max_size=6), st.randoms())
def test_result_is_independent_of_cuts_and_order(seed, cuts, random):
    values = numbers(seed)
    bounds = [0, *sorted(cuts), GRAINS]
    parts = [values[a * GRAIN : b * GRAIN] for a, b in pairwise(bounds)]
    random.shuffle(parts)
    assert total_of(*map(row_of, parts)) == total_of(row_of(values))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)],
    ids=str,
)
def test_equals_the_sum_of_squares(dtype, tolerance):
    values = numbers(3, dtype)
    wanted = math.fsum(value * value for value in values.tolist())
    assert total_of(row_of(values)) == pytest.approx(wanted, rel=tolerance)


def test_whole_numbers_are_added_without_rounding():
    values = torch.zeros(3 * GRAIN, dtype=torch.float64)
    values[0], values[GRAIN], values[2 * GRAIN] = 2.0**40, 2.0**-10, 3.0
    wanted = Fraction(2) ** 80 + Fraction(1, 2**20) + 9
    row = row_of(values)
    assert total_of(*[row] * 5) == float(5 * wanted)


def test_counts_only_the_own_part_of_an_interval():
    values = numbers(5)
    own = (3 * GRAIN, 9 * GRAIN)
    in_spans = MemoryStorage(values, [(0, 5 * GRAIN), (5 * GRAIN, GRAINS * GRAIN)])
    assert torch.equal(exact_row(in_spans, own), row_of(values[slice(*own)]))


def test_complex_numbers_count_as_two():
    values = numbers(6)
    assert torch.equal(row_of(torch.view_as_complex(values.view(-1, 2))), row_of(values))


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_nonfinite_values_give_nan(wrong):
    values = numbers(4)
    values[1000] = wrong
    assert math.isnan(total_of(row_of(values), row_of(numbers(5))))


def test_extreme_doubles():
    tiny = torch.full((GRAIN,), 2.0**-537, dtype=torch.float64)  # has the smallest square above 0
    assert total_of(row_of(tiny)) == GRAIN * 2.0**-1074
    large = torch.full((GRAIN,), 2.0**508, dtype=torch.float64)
    assert total_of(*[row_of(large)] * 2**2) == math.inf
