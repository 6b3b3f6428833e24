"""The order of the data as literal tables, and its laws for any numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import order
from shardwise.data.position import PartOrder, Position, restored
from shardwise.errors import DataError

SIZES = st.integers(1, 9)
ROWS = st.integers(1, 200)
MICRO = st.none() | st.integers(1, 50)

GOLDEN = {
    (0, 0): [4, 2, 1, 5, 6, 7, 0, 3],
    (0, 1): [7, 3, 1, 2, 5, 0, 6, 4],
    (1, 0): [0, 2, 3, 7, 5, 6, 4, 1],
}


def test_an_order_is_a_function_of_seed_and_epoch():
    """Golden: a change of these numbers changes every user's run."""
    assert order.epoch_order(0, 0, 8, shuffle=True).tolist() == GOLDEN[0, 0]
    assert order.epoch_order(0, 1, 8, shuffle=True).tolist() == GOLDEN[0, 1]
    assert order.epoch_order(1, 0, 8, shuffle=True).tolist() == GOLDEN[1, 0]
    assert list(order.epoch_order(1, 5, 4, shuffle=False)) == [0, 1, 2, 3]


def test_an_order_draws_from_no_global_generator():
    before = torch.get_rng_state()
    order.epoch_order(0, 0, 100, shuffle=True)
    assert torch.equal(before, torch.get_rng_state())


@given(st.integers(0, 2**31), st.integers(0, 50), st.integers(0, 300))
def test_an_order_is_a_permutation(seed, epoch, length):
    assert sorted(order.epoch_order(seed, epoch, length, shuffle=True)) == list(range(length))


@pytest.mark.parametrize(
    ("rows", "size", "micro", "cuts"),
    [
        (8, 2, None, [[(0, 4)], [(4, 8)]]),
        (5, 2, None, [[(0, 2)], [(2, 5)]]),
        (1, 2, None, [[(0, 0)], [(0, 1)]]),
        (2, 4, None, [[(0, 0)], [(0, 1)], [(1, 1)], [(1, 2)]]),
        (8, 2, 3, [[(0, 3), (3, 4)], [(4, 7), (7, 8)]]),
        (5, 2, 2, [[(0, 1), (1, 2)], [(2, 4), (4, 5)]]),
        (5, 2, 1, [[(0, 1), (1, 2), (2, 2)], [(2, 3), (3, 4), (4, 5)]]),
        (3, 1, 5, [[(0, 3)]]),
    ],
)
def test_the_cut_into_shares_and_micro_batches(rows, size, micro, cuts):
    assert [order.parts(rows, size, rank, micro) for rank in range(size)] == cuts


@given(ROWS, SIZES, MICRO)
def test_parts_cover_the_rows_once_in_order_and_are_as_many_on_every_rank(rows, size, micro):
    parts = [order.parts(rows, size, rank, micro) for rank in range(size)]
    assert [row for own in parts for a, b in own for row in range(a, b)] == list(range(rows))
    assert {len(own) for own in parts} == {order.micro_batches(rows, size, micro)}
    assert all(b - a <= (micro or rows) for own in parts for a, b in own)
    # no micro-batch is empty on all ranks
    assert all(any(b > a for a, b in column) for column in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("length", "batch", "drop", "steps", "used"),
    [(10, 4, False, 3, 10), (10, 4, True, 2, 8), (8, 4, False, 2, 8), (3, 4, False, 1, 3)],
)
def test_steps_of_an_epoch(length, batch, drop, steps, used):
    assert order.steps_per_epoch(length, batch, drop_last=drop) == steps
    assert order.used_length(length, batch, drop_last=drop) == used
    assert len(list(order.steps(used, batch))) == steps


def test_steps_go_on_from_an_offset():
    assert list(order.steps(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(order.steps(10, 4, 4)) == [(4, 8), (8, 10)]
    assert list(order.steps(10, 4, 10)) == []


@given(st.integers(1, 100), st.integers(0, 10_000))
def test_a_position_of_one_integer(length, samples):
    epoch, offset = order.locate(samples, length)
    assert epoch * length + offset == samples
    assert 0 <= offset < length
    position = restored({"samples": samples}, length, 8)
    assert (position.epoch, position.offset) == (epoch, offset)
    assert restored(position.state(length), length, 8) == position


def test_the_end_of_an_epoch_is_not_the_start_of_the_next():
    end = Position(epoch=1, offset=6, steps=2, before=6)
    assert restored(end.state(6), 6, 4) == end
    assert restored(end.next_epoch(6).state(6), 6, 4) == Position(epoch=2, before=12)
    assert restored(end.state(6), 5, 4) == Position(epoch=2, offset=2, steps=1, before=10)


def test_a_position_moves_by_steps_and_epochs():
    position = Position().stepped(4).stepped(4).stepped(2)
    assert (position.samples, position.steps) == (10, 3)
    assert position.next_epoch(10) == Position(epoch=1, before=10)
    assert Position().stepped(4).next_epoch(10) == Position(epoch=1, before=10)
    assert Position().stepped(4).next_epoch(None) == Position(epoch=1, before=4)


def test_a_state_with_its_epoch_is_restored():
    position = Position(epoch=2, before=17).stepped(5)
    assert restored(position.state(None), None, 4) == position
    parts = Position(order=PartOrder(parts=3, batch=8, joined=True)).stepped(8)
    assert restored(parts.state(None), None, 4) == parts
    positioned = replace(parts, stream={"at": 8})
    assert restored(positioned.state(None), None, 4) == positioned


@pytest.mark.parametrize(
    ("state", "length"),
    [({}, 10), ({"samples": "many"}, 10), ({"samples": -1}, 10), ({"samples": 3}, None)],
)
def test_a_state_of_something_else_is_refused(state, length):
    with pytest.raises(DataError, match=r"position|state of a Loader"):
        restored(state, length, 4)
