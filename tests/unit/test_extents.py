"""Allocation of ranges of a file."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.extents import Extents
from shardwise.tiers.host_memory import PAGE


def test_reuses_freed_range_first() -> None:
    extents = Extents()
    assert [extents.take(n * PAGE) for n in (1, 2, 1)] == [0, PAGE, 3 * PAGE]
    extents.give(PAGE, 2 * PAGE)
    assert extents.take(PAGE) == PAGE
    assert extents.take(PAGE) == 2 * PAGE
    assert extents.end == 4 * PAGE


def test_joins_adjacent_free_ranges() -> None:
    extents = Extents()
    for _ in range(3):
        extents.take(PAGE)
    for start in (0, 2 * PAGE, PAGE):
        extents.give(start, PAGE)
    assert extents.take(3 * PAGE) == 0


def test_extends_the_last_free_range() -> None:
    extents = Extents()
    extents.take(PAGE)
    extents.give(extents.take(PAGE), PAGE)
    assert extents.take(3 * PAGE) == PAGE
    assert extents.end == 4 * PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_ranges_never_overlap(steps: list[tuple[bool, int]]) -> None:
    extents, held = Extents(), []
    for take, number in steps:
        if take or not held:
            held.append((extents.take(number * PAGE), number * PAGE))
        else:
            extents.give(*held.pop(number % len(held)))
        ends = [0, *(start + nbytes for start, nbytes in sorted(held))]
        starts = [*(start for start, _ in sorted(held)), extents.end]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        assert extents.in_use == sum(nbytes for _, nbytes in held)
    for place in held:
        extents.give(*place)
    assert extents.in_use == 0
