"""The harness itself: results by rank, tracebacks, time-outs, and a clean start after each."""

import os
import time

import pytest
import torch

from shardwise.errors import UsageError
from tests.distributed.group import Groups, RankFailed


def _rows(world, total):
    return world.share(torch.arange(total)).tolist()


def _pid(world):
    return os.getpid()


def _raise_on(world, guilty, then_meet):
    if world.rank in guilty:
        raise UsageError(f"rank {world.rank} says no")
    if then_meet:
        world.barrier()


def _exit_on(world, guilty):
    if world.rank == guilty:
        os._exit(3)
    world.barrier()


def _sleep(world, guilty):
    if world.rank == guilty:
        time.sleep(60)


def _die_before_child(world):
    if os.fork() == 0:  # has a copy of the rank's connection
        time.sleep(60)
        os._exit(0)
    os._exit(3)


@pytest.mark.parametrize(
    ("size", "rows"), [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3, 4]]), (3, [[0], [1, 2], [3, 4]])]
)
def test_results_come_by_rank(group, size, rows):
    assert group(size)(_rows, 5) == rows


def test_a_group_stays_warm(group):
    assert group(2)(_pid) == group(2)(_pid)


def test_errors_alike_on_all_ranks_keep_the_group(group):
    before = group(2)(_pid)
    said = group(2).errors(_raise_on, [0, 1], False)
    assert said == [("UsageError", "rank 0 says no"), ("UsageError", "rank 1 says no")]
    assert group(2)(_pid) == before


def test_the_primary_traceback_comes_last_and_the_group_is_new(group):
    before = group(2)(_pid)
    with pytest.raises(RankFailed) as failure:
        group(2)(_raise_on, [1], True)
    text = str(failure.value)
    assert text.index("PeerLost") < text.index("=== rank 1 of 2 ===")
    assert "raise UsageError" in text
    assert set(before).isdisjoint(group(2)(_pid))


def test_a_rank_that_dies_is_an_error_of_its_own(group):
    errors = group(2).errors(_exit_on, 1)
    assert errors[1] == ("Died", "exit code 3")
    assert errors[0] is not None
    assert errors[0][0] == "PeerLost"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_death_of_rank_is_noticed_while_its_child_lives(group):
    assert group(1).errors(_die_before_child, limit=20) == [("Died", "exit code 3")]


def test_stacks_leave_out_rank_that_has_died():
    groups = Groups()
    try:
        assert groups(1)(_pid)
        (rank,) = groups(1)._ranks
        rank.process.kill()
        rank.process.join()
        assert "printed by rank 0" in groups(1)._stacks([0])
    finally:
        groups.close()


def test_a_time_out_shows_where_the_rank_was():
    groups = Groups()
    try:
        with pytest.raises(RankFailed, match=r"(?s)rank\(s\) \[0\].*_sleep"):
            groups(1)(_sleep, 0, limit=0.5)
    finally:
        groups.close()


def test_stops_the_least_recently_used_group(monkeypatch):
    monkeypatch.setattr("tests.distributed.group.MOST_RANKS", 2)
    groups = Groups()
    try:
        first = groups(1)(_pid)
        assert groups(1, seed=1)(_pid) == groups(1, seed=1)(_pid)
        assert groups(1)(_pid) == first
        assert groups(1, seed=2)(_pid) != first
        assert groups(1, seed=3)(_pid) != first
        assert [group.is_running for group in groups._groups.values()] == [False, False, True, True]
        assert groups(1)(_pid) != first
    finally:
        groups.close()
