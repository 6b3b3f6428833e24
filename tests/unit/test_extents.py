"""Which ranges of a file are free."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.extents import Extents
from shardwise.tiers.host_memory import PAGE


def test_what_is_given_back_is_taken_first() -> None:
    extents = Extents()
    assert [extents.take(n * PAGE) for n in (1, 2, 1)] == [0, PAGE, 3 * PAGE]
    extents.give(PAGE, 2 * PAGE)
    assert extents.take(PAGE) == PAGE
    assert extents.take(PAGE) == 2 * PAGE
    assert extents.end == 4 * PAGE


def test_neighbours_are_joined() -> None:
    extents = Extents()
    for _ in range(3):
        extents.take(PAGE)
    for start in (0, 2 * PAGE, PAGE):
        extents.give(start, PAGE)
    assert extents.take(3 * PAGE) == 0


def test_the_last_range_grows_with_the_file() -> None:
    extents = Extents()
    extents.take(PAGE)
    extents.give(extents.take(PAGE), PAGE)
    assert extents.take(3 * PAGE) == PAGE
    assert extents.end == 4 * PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_no_two_ranges_overlap(steps: list[tuple[bool, int]]) -> None:
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
