"""Ranks of several hosts, which share memory inside each: the verbs, and what only they promise.

Hosts are made believe: ranks of one machine give different host names.
"""

import pytest
import torch

from shardwise.config import Settings
from shardwise.engine.exact_mode import check
from tests.distributed import test_collectives as verbs
from tests.distributed.test_engine import ROWS, within_host_case
from tests.distributed.test_shared import sums_under_random_delays
from tests.tables import each_value

HOSTS = {4: [0, 0, 1, 1], 6: [0, 1, 2, 2, 0, 1]}
"""The host of each rank, by number of ranks, including interleaved hosts."""

CUTS = [(4, [0, 4, 4, 4, 12]), (4, [0, 2, 7, 7, 11]), (6, [0, 4, 4, 5, 9, 11, 12])]
LARGE = [(size, [10_007 * cut for cut in cuts]) for size, cuts in CUTS]
CPU = torch.device("cpu")


@pytest.fixture
def hosts(group):
    """`hosts(size)` is a group of as many ranks on several hosts."""
    return lambda size=4, **settings: group(size, hosts=HOSTS[size], **settings)


def name(world):
    return world.collectives.name


def test_it_is_chosen_by_itself_where_hosts_have_as_many_ranks(group, hosts):
    assert hosts()(name) == ["shared memory in each of 2 hosts, gloo between"] * 4
    assert hosts(transport="gloo")(name) == ["gloo"] * 4
    uneven = "gloo (hosts have 2 and 1 ranks, so none shares memory)"
    assert group(3, hosts=[0, 0, 1])(name) == [uneven] * 3
    assert group(2, hosts=[0, 1])(name) == ["gloo"] * 2


@each_value(cut=CUTS + LARGE, dtype=verbs.DTYPES)
def test_verbs(hosts, cut, dtype):
    size, cuts = cut
    hosts(size)(verbs.verbs, dtype, cuts)


@each_value(cut=[CUTS[1], LARGE[0], LARGE[2]], dtype=verbs.DTYPES)
def test_verbs_in_memory_of_the_transport(hosts, cut, dtype):
    size, cuts = cut
    hosts(size)(verbs.verbs_in_our_memory, dtype, cuts)


@pytest.mark.parametrize("length", [40, 20_000])
def test_many_in_flight_waited_for_in_any_order(hosts, length):
    for _ in range(5):
        hosts()(verbs.many_in_flight, length)


@pytest.mark.parametrize("numel", [8, 80_000])
def test_half_precision_sums_in_fp32(hosts, numel):
    hosts()(verbs.half_precision, numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_a_tree(hosts, dtype):
    hosts()(verbs.in_tree, 80_000, dtype)


def exact(world):
    check(Settings(exact=6), world.collectives)


def test_hosts_that_are_no_nodes_of_the_tree_are_refused(hosts):
    (kind, said), *_ = hosts(6).errors(exact)
    assert kind == "ConfigError"
    assert "the ranks of each host must be one subtree" in said


def test_objects(hosts):
    hosts()(verbs.objects)


@pytest.mark.parametrize("length", [1, 50_000])
def test_rows(hosts, length):
    hosts()(verbs.rows, length)


def test_sums_are_bit_equal_whoever_is_late(hosts):
    first = hosts()(sums_under_random_delays, 0)
    for seed in range(1, 4):
        assert hosts()(sums_under_random_delays, seed) == first


# -- other groups ---------------------------------------------------------------------------------

SPLITS = [
    ([[0, 1], [2, 3]], {"shared memory"}),
    ([[0, 2], [1, 3]], {"gloo"}),
    ([[0, 1, 3], [2]], {"gloo", "none"}),
    ([[3, 0, 1, 2]], {"shared memory in each of 2 hosts, gloo between"}),
]


def split(world, groups):
    part = world.collectives.split(groups)
    mine = sorted(next(ranks for ranks in groups if world.rank in ranks))
    assert (part.size, part.rank) == (len(mine), mine.index(world.rank))
    total = torch.full((30_000,), float(world.rank))
    part.all_reduce(total).wait()
    assert torch.equal(total, torch.full_like(total, sum(mine)))
    rows = part.gather_rows(torch.tensor([float(world.rank)]))
    assert rows.flatten().tolist() == mine
    return part.name


@pytest.mark.parametrize(("groups", "names"), SPLITS)
def test_a_part_of_the_ranks_talks_as_it_can(hosts, groups, names):
    assert set(hosts()(split, groups)) == names


def crossing(world):
    """Ranks wait for the calls of two groups in different orders."""
    groups = [world.collectives, world.side_channel]
    buffers = [torch.full((30_000,), world.rank + scale) for scale in (1.0, 10.0)]
    order = [0, 1] if world.rank % 2 else [1, 0]
    handles = [groups[number].all_reduce(buffers[number]) for number in order]
    for handle in handles:
        handle.wait()
    assert [float(buffer[0]) for buffer in buffers] == [10.0, 46.0]


def test_groups_are_waited_for_in_any_order(hosts):
    for _ in range(5):
        hosts()(crossing)


@pytest.mark.parametrize("zero", ROWS)
def test_sharded_within_a_host_and_replicated_between(hosts, zero):
    hosts()(within_host_case, zero)
