"""What a step says of calls that ranks have not made alike."""

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


def test_rows_that_differ_by_little_are_said_of_the_rank_that_is_furthest():
    world = Ranks(([], 1e6), ([], 1e6 + 1), ([], 1e6 + 2))
    check_calls(world, calls_differ=False, rows_differ=True)
    assert "on worker 2" in world.said[0]


def test_other_numbers_of_batches_are_compared_once():
    one, two = CommonCalls(), CommonCalls()
    one.note(SHARE)
    assert one.number() != two.number()
    world = Ranks(one.made(), two.made())
    check_calls(world, calls_differ=True, rows_differ=False)
    assert "different numbers of batches" in world.said[0]
    world.calls.note(SHARE)
    assert world.calls.number() == two.number()
    world.calls.note("world.draw")
    assert world.calls.number() != two.number()


def test_other_calls_are_refused():
    world = Ranks(([["world.draw", "a.py:1", 1]], 0.0), ([], 0.0))
    with pytest.raises(UsageError, match="different calls"):
        check_calls(world, calls_differ=True, rows_differ=False)
