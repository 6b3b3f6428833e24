"""The generator of all-pairs cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parity.pairwise import all_pairs, pairs_of, pairwise

FACTORS = st.lists(st.integers(1, 4), min_size=2, max_size=6).map(
    lambda counts: {f"factor{i}": tuple(range(count)) for i, count in enumerate(counts)}
)


def _covered(cases, factors):
    return {pair for case in cases for pair in pairs_of(case, factors)}


@given(FACTORS)
def test_every_pair_meets(factors):
    cases = pairwise(factors)
    assert _covered(cases, factors) == set(all_pairs(factors))
    assert all(case.keys() == factors.keys() for case in cases)


@given(FACTORS)
def test_the_same_factors_give_the_same_cases(factors):
    assert pairwise(factors) == pairwise(factors)


def test_two_factors_are_their_product():
    assert pairwise({"a": "xy", "b": (1, 2)}) == [
        {"a": "x", "b": 1},
        {"a": "x", "b": 2},
        {"a": "y", "b": 1},
        {"a": "y", "b": 2},
    ]


def test_far_fewer_than_the_product():
    factors = {f"factor{i}": range(3) for i in range(8)}
    assert len(pairwise(factors)) < 25


def test_what_is_not_allowed_never_meets_and_all_else_does():
    factors = {"a": range(3), "b": range(3), "c": range(2)}

    def allowed(case):
        return not (case.get("a") == 0 and case.get("b") == 1)

    cases = pairwise(factors, allowed)
    assert all(map(allowed, cases))
    assert set(all_pairs(factors)) - _covered(cases, factors) == {(("a", 0), ("b", 1))}


def test_a_dead_end_is_named():
    def allowed(case):
        return not (case.get("a") == 0 and "c" in case)

    with pytest.raises(ValueError, match="No value of c goes with"):
        pairwise({"a": range(2), "b": range(2), "c": range(2)}, allowed)
