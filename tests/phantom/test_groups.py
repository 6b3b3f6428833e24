"""Creation of groups over NCCL."""

from datetime import timedelta

from tests.distributed.worker import SECONDS_A_COLLECTIVE_MAY_WAIT


def split(world):
    """Return the time limit of a group, and its collectives during creation."""
    from tests.phantom import collectives

    before = sum(collectives.calls.values())
    part = world.collectives.split([[0, 1]])
    part.close()
    return collectives.made[-1]["timeout"], sum(collectives.calls.values()) - before


def test_subgroup_has_the_time_limit_of_the_group_and_connects_at_once(phantom):
    for timeout, calls in phantom(2, split):
        assert timeout == timedelta(seconds=SECONDS_A_COLLECTIVE_MAY_WAIT)
        assert calls
