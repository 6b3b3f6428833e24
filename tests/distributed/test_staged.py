"""The transport of ranks that share a GPU, with the CPU in the place of the GPU."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import HostStaged
from tests.distributed import test_collectives as cases

CPU = torch.device("cpu")


def staged(world, function, *args):
    """`function` in a world whose tensors all go through the host's memory."""
    plain = world.collectives
    world.collectives = HostStaged(plain, CPU)
    world.__dict__.pop("side_channel", None)
    try:
        return function(world, *args)
    finally:
        world.collectives = plain
        world.__dict__.pop("side_channel", None)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("size", "cuts"), cases.CUTS)
def test_verbs(group, size, cuts, dtype):
    group(size, transport="gloo")(staged, cases.verbs, dtype, cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verbs_in_memory_of_the_transport(group, dtype):
    group(3, transport="gloo")(staged, cases.verbs_in_our_memory, dtype, [0, 0, 5, 9])


def test_many_in_flight_waited_for_in_any_order(group):
    group(3, transport="gloo")(staged, cases.many_in_flight, 40)


def test_half_precision_sums_in_fp32(group):
    group(4, transport="gloo")(staged, cases.half_precision, 8)


def test_sums_in_a_tree(group):
    group(4, transport="gloo")(staged, cases.in_tree, 40, torch.float32)


def test_objects_rows_and_groups_of_their_own(group):
    for case, *args in ((cases.objects,), (cases.rows, 5), (cases.groups_of_their_own,)):
        group(3, transport="gloo")(staged, case, *args)


def trained(world, zero):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.0005)
    x = torch.arange(48.0).view(6, 8) / 48
    for _ in range(4):
        engine.backward(model(world.share(x)).square().mean())
        engine.step(max_norm=1.0)
    with engine.full_parameters():
        values = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return values


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_trains_as_without_the_way_through_the_host(group, zero):
    plain = group(2, transport="gloo")(trained, zero)[0]
    for values in group(2, transport="gloo")(staged, trained, zero):
        assert all(map(torch.equal, values, plain))
