"""Buckets and intervals: literal tables, and properties of every layout."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.bucket_layout import (
    ALIGNMENT,
    DATA,
    EXPERT_COPIES,
    Bucket,
    Slot,
    Spec,
    check,
    even_cuts,
    lay_out,
    padding,
)


def spec(numel, key="fp32", whole=False):
    return Spec(name=f"p{numel}", numel=numel, itemsize=4, key=key, whole=whole)


@pytest.mark.parametrize(
    ("numel", "size", "cuts"),
    [
        (10, 1, [0, 10]),
        (10, 2, [0, 5, 10]),
        (10, 3, [0, 3, 6, 10]),
        (2, 4, [0, 0, 1, 1, 2]),
        (0, 2, [0, 0, 0]),
    ],
)
def test_even_cuts(numel, size, cuts):
    assert even_cuts(numel, size) == cuts


def test_parameters_are_in_reverse_order_and_aligned():
    (bucket,) = lay_out([spec(5), spec(20), spec(16)], ranks=2, capacity=10**6)
    assert bucket.slots == (Slot(2, 0, 16), Slot(1, 16, 36), Slot(0, 48, 53))
    assert bucket.cuts == (0, 32, 64)
    assert bucket.numel == 64
    assert padding([bucket]) == 64 - 41
    assert bucket.pieces(*bucket.interval(0)) == [Slot(2, 0, 16, 0), Slot(1, 16, 32, 0)]
    assert bucket.pieces(*bucket.interval(1)) == [Slot(1, 32, 36, 16), Slot(0, 48, 53, 0)]


def test_bucket_has_one_kind_and_respects_capacity():
    specs = [spec(16), spec(16, "bf16"), spec(16), spec(1000), spec(16)]
    buckets = lay_out(specs, ranks=1, capacity=2 * 16 * 4)
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [
        [4],
        [3],
        [1],
        [2, 0],
    ]


def test_whole_tensors_have_one_owner():
    specs = [spec(n, whole=True) for n in (64, 16, 32, 16)]
    (bucket,) = lay_out(specs, ranks=2, capacity=10**6)
    owned = [
        [piece.parameter for piece in bucket.pieces(*bucket.interval(rank))] for rank in range(2)
    ]
    assert owned == [[0], [3, 2, 1]]
    assert bucket.cuts == (0, 64, 128)


def test_ranks_may_own_nothing():
    (bucket,) = lay_out([spec(16, whole=True)], ranks=3, capacity=10**6)
    assert bucket.cuts == (0, 16, 16, 16)


shapes = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from(["a", "b"])), min_size=1, max_size=40
)


@given(
    shapes, st.integers(1, 8), st.integers(64, 4000), st.booleans(), st.sampled_from([1, 24, 64])
)
def test_every_layout(shapes, ranks, capacity, whole, grain):
    specs = [spec(numel, key, whole) for numel, key in shapes]
    buckets = lay_out(specs, ranks=ranks, capacity=capacity, grain=grain)
    check(buckets, specs, ranks)
    for bucket in buckets:
        starts = [slot.start for slot in bucket.slots]
        assert all(place % grain == 0 for place in [*starts, *bucket.cuts])
    covered = [0] * len(specs)
    for bucket in buckets:
        assert {specs[slot.parameter].key for slot in bucket.slots} == {bucket.key}
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        for rank in range(ranks):
            for piece in bucket.pieces(*bucket.interval(rank)):
                covered[piece.parameter] += piece.end - piece.start
                if whole:
                    assert piece.end - piece.start == specs[piece.parameter].numel
        if not whole:
            lengths = {b - a for a, b in zip(bucket.cuts, bucket.cuts[1:], strict=False)}
            assert len(lengths) == 1, "intervals of element-wise buckets are equal"
    assert covered == [spec.numel for spec in specs]


def test_experts_have_buckets_of_their_own():
    specs = [spec(32), replace(spec(32), axis=EXPERT_COPIES), replace(spec(0), axis=EXPERT_COPIES)]
    buckets = lay_out(specs, ranks=4, capacity=10**6, expert_copies=2)
    check(buckets, specs, 4, 2)
    by_axis = {bucket.axis: bucket for bucket in buckets}
    assert by_axis[DATA].cuts == (0, 16, 32, 48, 64)
    assert by_axis[EXPERT_COPIES].cuts == (0, 16, 32)
    assert [slot.parameter for slot in by_axis[EXPERT_COPIES].slots] == [2, 1]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500))
def test_pieces_cover_an_interval_in_order(numel, a, b):
    bucket = Bucket(
        "k", (Slot(0, 0, numel), Slot(1, numel + 3, numel + 43)), numel + 50, (0, numel + 50)
    )
    first, end = min(a, b), max(a, b)
    pieces = bucket.pieces(first, end)
    assert all(first <= piece.start < piece.end <= end for piece in pieces)
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)
    for piece in pieces:
        slot = bucket.slots[piece.parameter]
        assert piece.offset == piece.start - slot.start
