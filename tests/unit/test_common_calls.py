"""Messages about calls that some ranks have not made."""

from types import SimpleNamespace

import pytest

from shardwise.engine.usage_checks import check_calls
from shardwise.errors import UsageError
from shardwise.world.common_calls import SHARE, CommonCalls


class Ranks:
    """A world whose ranks have made the calls `told`."""

    def __init__(self, *told):
        self.calls = CommonCalls()
        self.groups_apart = 1
        self.step_group = SimpleNamespace(gather_plain=lambda mine: list(told))
        self.said = []
        self.say_once = self.said.append


def test_names_the_rank_whose_rows_are_furthest_apart():
    world = Ranks(([], 1e6), ([], 1e6 + 1), ([], 1e6 + 2))
    check_calls(world, calls_differ=False, rows_differ=True)
    assert "on worker 2" in world.said[0]


def test_warns_once_of_different_numbers_of_batches():
    one, two = CommonCalls(), CommonCalls()
    one.note(SHARE)
    assert one.number() != two.number()
    world = Ranks(one.report(), two.report())
    check_calls(world, calls_differ=True, rows_differ=False)
    assert "different numbers of batches" in world.said[0]
    world.calls.note(SHARE)
    assert world.calls.number() == two.number()
    world.calls.note("world.draw")
    assert world.calls.number() != two.number()


def test_refuses_different_calls():
    world = Ranks(([["world.draw", "a.py:1", 1]], 0.0), ([], 0.0))
    with pytest.raises(UsageError, match="different calls"):
        check_calls(world, calls_differ=True, rows_differ=False)
