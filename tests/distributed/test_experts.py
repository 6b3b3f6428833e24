"""`--expert`: training equals that of one process, in every row, on every number of ranks."""

import pytest

from tests.distributed.experts import Problem, compare, plain, trained


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_equals_one_process(group, optimizer, zero):
    problem = Problem(optimizer=optimizer, settings={"zero": zero})
    expected = plain(problem)
    for ours in group(2, expert=2)(trained, problem):
        compare(ours, expected)
