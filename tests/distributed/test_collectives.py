"""The verbs of Gloo against what torch says they are, for many sizes and dtypes."""

import pytest
import torch

from shardwise.errors import PeerLost

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def values(rank, numel, dtype):
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(0, 50, (numel,), generator=draw).to(dtype)


def verbs(world, dtype, cuts):
    group, numel = world.collectives, cuts[-1]
    everyone = [values(rank, numel, dtype) for rank in range(world.size)]
    total = sum(everyone[1:], everyone[0].clone())
    own = slice(cuts[world.rank], cuts[world.rank + 1])

    buffer = everyone[world.rank].clone()
    group.all_reduce(buffer).wait()
    assert torch.equal(buffer, total)

    buffer = everyone[world.rank].clone()
    group.reduce_scatter(buffer, cuts).wait()
    assert torch.equal(buffer[own], total[own])
    outside = torch.ones(numel, dtype=torch.bool)
    outside[own] = False
    assert torch.equal(buffer[outside], everyone[world.rank][outside])

    group.all_gather(buffer, cuts).wait()
    assert torch.equal(buffer, total)

    for source in range(world.size):
        buffer = everyone[world.rank].clone()
        group.broadcast(buffer, source).wait()
        assert torch.equal(buffer, everyone[source])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "cuts"), [(2, [0, 3, 7]), (3, [0, 0, 5, 9]), (4, [0, 4, 4, 4, 12])]
)
def test_verbs(group, size, cuts, dtype):
    group(size)(verbs, dtype, cuts)


def many_in_flight(world):
    group = world.collectives
    buffers = [values(world.rank + 10 * i, 40 + i, torch.float64) for i in range(20)]
    handles = [
        group.all_reduce(buffer)
        if i % 2
        else group.reduce_scatter(buffer, [0, 10, *[40 + i] * (world.size - 1)])
        for i, buffer in enumerate(buffers)
    ]
    for handle in handles:  # the second halves start in this order on every rank
        handle.advance()
    for handle in reversed(handles):
        handle.wait()
    for i, buffer in enumerate(buffers):
        total = sum(values(rank + 10 * i, 40 + i, torch.float64) for rank in range(world.size))
        mine = slice(0, 10) if world.rank == 0 else slice(10, 40 + i)
        part = slice(None) if i % 2 else mine if world.rank < 2 else slice(0, 0)
        assert torch.equal(buffer[part], total[part])


def test_many_in_flight_waited_for_in_any_order(group):
    for _ in range(5):
        group(3)(many_in_flight)


def half_precision(world):
    """0.1 four times in bf16: rounding after each addition would show."""
    buffer = torch.full((8,), 0.1 * (1 + world.rank), dtype=torch.bfloat16)
    exact = sum(
        torch.full((8,), 0.1 * (1 + rank), dtype=torch.bfloat16).float()
        for rank in range(world.size)
    )
    world.collectives.all_reduce(buffer).wait()
    assert torch.equal(buffer, exact.bfloat16())


def test_half_precision_sums_in_fp32(group):
    group(4)(half_precision)


def objects(world):
    gathered = world.gather({"rank": world.rank, "data": "x" * world.rank})
    assert gathered == [{"rank": r, "data": "x" * r} for r in range(world.size)]
    assert world.broadcast_object(world.rank + 5, source=1) == 6
    assert world.any(world.rank == 1)
    assert not world.any(False)


def test_objects(group):
    group(3)(objects)


def a_rank_leaves(world):
    if world.rank == 1:
        import os

        os._exit(0)
    world.barrier()


def test_a_rank_that_leaves_is_said(group):
    error = group(2).errors(a_rank_leaves)[0]
    assert error is not None
    kind, message = error
    assert kind == PeerLost.__name__
    assert "Rank 0 of 2 lost another rank in all-gather" in message
