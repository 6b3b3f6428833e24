"""The gather order: literal tables, and simulated ranks that skip arbitrary units."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.agreed_order import SETTLED, AgreedOrder, with_unseen
from shardwise.errors import OrderError

NAMES = ["rest", "a", "b", "c", "d"]
UNITS = range(len(NAMES))


def order_of(agree, *, staying=(), alone=False):
    order = AgreedOrder(agree, alone=alone)
    assert order.join(NAMES, staying=staying) == 0
    return order


class Agreement:
    """The `agree` function for several ranks that run as threads."""

    def __init__(self, ranks):
        self._wishes = {}
        self._meeting = threading.Barrier(ranks, timeout=10)

    def of(self, rank):
        def agree(wanted):
            self._wishes[rank] = wanted
            self._meeting.wait()
            smallest = min(self._wishes.values())
            self._meeting.wait()
            return smallest

        return agree


def gathered(plans, *, expected=UNITS, descending=False):
    """Return the units that each rank gathers, pass by pass.

    `plans[rank][i]` are the units that the rank needs in pass i. A None at the end means that it
    fails.
    """
    agreement = Agreement(len(plans))
    told = {}

    def rank_of(rank):
        order = order_of(agreement.of(rank))
        told[rank] = []
        for wanted in plans[rank]:
            order.open("pass", descending=descending)
            failed = None in wanted
            taken = []
            for unit in wanted:
                if unit is not None:
                    taken += order.until(unit)
            taken += order.rest(expected=expected, failed=failed)
            told[rank].append(taken)

    errors = []

    def run(rank):
        try:
            rank_of(rank)
        except BaseException as error:
            errors.append(error)
            agreement._meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [told[rank] for rank in range(len(plans))]


@pytest.mark.parametrize(
    ("seen", "full", "merged"),
    [
        ([], [], []),
        ([], [0, 1, 2], [0, 1, 2]),
        ([0, 2], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([2, 0], [0, 1, 2, 3], [2, 3, 0, 1]),
        ([0, 1, 0], [0, 1, 2], [0, 1, 2, 0]),
        ([3, 1], [3, 2, 1, 0], [3, 2, 1, 0]),
        ([1, 2], [0, 1, 2], [0, 1, 2]),
        ([4, 0], [0, 1], [4, 0, 1]),
    ],
)
def test_units_that_nobody_wanted(seen, full, merged):
    assert with_unseen(seen, full) == merged


@pytest.mark.parametrize(
    ("plans", "all_gather"),
    [
        # A single rank gathers the units it needs, and later those it skipped in the first pass.
        ([[[0, 1, 3], [0, 3]]], [[0, 1, 3], [0, 1, 2, 3, 4]]),
        # Two ranks with different branches.
        ([[[0, 1], [0]], [[0, 2], [0, 4]]], [[0, 1, 2], [0, 1, 2, 3, 4]]),
        # A unit twice in a pass.
        ([[[0, 1, 2, 1], [1, 1]]], [[0, 1, 2, 1], [0, 1, 2, 3, 4, 1]]),
        # After a pass that failed on all ranks, ranks agree again.
        ([[[0, 2, None], [0, 3, 1]]], [[0, 2], [0, 3, 1]]),
        # One rank fails, and the other ranks' pass is learned.
        ([[[0, None], [0, 3]], [[0, 3, 1], [1]]], [[0, 3, 1], [0, 3, 4, 1, 2]]),
        # No rank needs anything.
        ([[[], []], [[], []]], [[], [0, 1, 2, 3, 4]]),
    ],
)
def test_tables(plans, all_gather):
    assert gathered(plans) == [all_gather] * len(plans)


def test_backward_wants_the_last_first():
    plans = [[[0, 3, 1], [0, 2]], [[0, 2], [0, 4, 1]]]
    for taken in gathered(plans, expected=[4, 3, 2, 1, 0], descending=True):
        assert taken == [[0, 3, 2, 1], [0, 4, 3, 2, 1]]


def test_another_order_is_named():
    with pytest.raises(OrderError, match=r"Unit a is needed after c.*--units"):
        gathered([[*[[0, 1, 3]] * (SETTLED + 1), [0, 3, 1]]], expected=[0, 1, 3])
    with pytest.raises(OrderError, match=r"Unit d is needed after the start.*engine\.uneven"):
        gathered([[*[[0, 1]] * (SETTLED + 1), [4]]], expected=[0, 1])


def test_another_order_before_that_is_taken():
    plans = [[[0, 1, 3], [0, 3, 1]], [[0], [1, 2, 0]]]
    assert gathered(plans) == [[[0, 1, 3], [0, 1, 2, 3, 4, 0, 1]]] * 2


def test_one_that_skips_keeps_a_pass_from_being_settled():
    often = SETTLED + 5
    plans = [[*[[0, 1, 3]] * often, [0, 3, 1]], [*[[0, 3]] * often, [0, 3]]]
    assert gathered(plans, expected=[0, 1, 3])[0][-1] == [0, 1, 3, 1]


def test_what_stays_without_a_turn_is_no_other_order():
    asks = []
    order = order_of(lambda wanted: asks.append(wanted) or wanted, staying=[0])
    for _ in range(SETTLED + 3):
        order.open("pass")
        assert [entry for unit in (1, 2) for entry in order.until(unit)][-2:] == [1, 2]
        list(order.rest(expected=[0, 1, 2]))
    assert len(asks) == 3 + SETTLED


def test_alone_no_order_is_wrong():
    order = order_of(lambda wanted: wanted, alone=True)
    for wanted in (*[[0, 1, 3]] * (SETTLED + 1), [3, 1, 0]):
        order.open("pass")
        assert [entry for unit in wanted for entry in order.until(unit)][-1] == wanted[-1]
        assert list(order.rest(expected=[0, 1, 3])) == []


programs = st.integers(1, 3).flatmap(
    lambda ranks: st.lists(
        st.lists(
            st.lists(st.sampled_from(list(UNITS)), max_size=7), min_size=ranks, max_size=ranks
        ),
        min_size=1,
        max_size=4,
    )
)


@settings(max_examples=60, deadline=None)
@given(passes=programs)
def test_any_order_where_not_all_was_expected(passes):
    """Units in any order and number."""
    plans = [[each[rank] for each in passes] for rank in range(len(passes[0]))]
    told = gathered(plans)
    assert all(taken == told[0] for taken in told)
    for wanted, taken in zip(plans, told, strict=True):
        for needs, got in zip(wanted, taken, strict=True):
            left = iter(got)
            assert all(unit in left for unit in needs)


def test_what_is_over():
    order = order_of(lambda wanted: wanted)
    order.open("pass")
    told = [(entry, order.over()) for unit in (0, 2, 1, 2, 3) for entry in order.until(unit)]
    assert [over for _, over in told] == [None, 0, 2, 1, None], "the first pass tells each once"
    assert list(order.rest()) == []
    order.open("pass")
    told = [(entry, order.over()) for entry in order.until(1)]
    assert order.next() == 2
    told += [(entry, order.over()) for entry in order.until(3)]
    assert told == [(0, None), (2, 0), (1, None), (2, 1), (3, 2)]
    assert order.next() is None
    assert list(order.rest()) == []


def test_serving_until_nobody_wants_anything():
    wishes = iter([2, 0, len(NAMES)])
    order = order_of(lambda wanted: min(wanted, next(wishes)))
    assert list(order.serve()) == [2, 0]


subsets = st.lists(st.sampled_from(list(UNITS)), unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(
    passes=st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(subsets, st.booleans()), min_size=ranks, max_size=ranks),
            min_size=1,
            max_size=5,
        )
    ),
    descending=st.booleans(),
)
def test_all_ranks_gather_the_same(passes, descending):
    """All ranks run one common sequence that contains everything they need.

    This holds for any units that a rank skips, and any pass in which it fails.
    """
    order = sorted(UNITS, reverse=descending)

    def plan(rank):
        return [
            sorted(each[rank][0], reverse=descending) + [None] * each[rank][1] for each in passes
        ]

    plans = [plan(rank) for rank in range(len(passes[0]))]
    told = gathered(plans, expected=order, descending=descending)
    assert all(taken == told[0] for taken in told)
    for wanted, taken in zip(plans, told, strict=True):
        for needs, got in zip(wanted, taken, strict=True):
            assert set(needs) - {None} <= set(got)
            assert got == sorted(got, reverse=descending)
            assert len(set(got)) == len(got)
