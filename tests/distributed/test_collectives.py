"""The collectives of each CPU transport, compared with torch's, for many sizes and dtypes."""

import random
import re
import socket
import sys
import threading
import time
from itertools import pairwise
from operator import add

import pytest
import torch

from shardwise.comm import Sum, gloo, gloo_exchange, ordered_sums, shared_memory
from shardwise.comm.socket_mesh import INLINE
from shardwise.errors import CollectiveError, PeerLost
from shardwise.layout import sum_tree
from shardwise.layout.bucket_layout import even_cuts
from shardwise.net import listeners
from tests.tables import each_value

TRANSPORTS = ["shared", "gloo"]
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

    # Each rank already holds the next one's interval.
    held = (world.rank + 1) % world.size
    buffer = torch.zeros_like(total)
    for rank in (world.rank, held):
        buffer[cuts[rank] : cuts[rank + 1]] = total[cuts[rank] : cuts[rank + 1]]
    group.all_gather_others(buffer, cuts, held).wait()
    assert torch.equal(buffer, total)

    buffer = everyone[world.rank].clone()
    mine = buffer[own].clone()
    buffer[own] = 99
    group.reduce_scatter_onto(mine, buffer, cuts).wait()
    assert torch.equal(mine, total[own])
    assert torch.equal(buffer[outside], everyone[world.rank][outside])

    for source in range(world.size):
        buffer = everyone[world.rank].clone()
        group.broadcast(buffer, source).wait()
        assert torch.equal(buffer, everyone[source])

    counts = [[(a + 2 * b) % 5 * (numel % 7) for b in range(world.size)] for a in range(world.size)]
    sent = [values(rank, sum(row), dtype).split(row) for rank, row in enumerate(counts)]
    expected = torch.cat([parts[world.rank] for parts in sent])
    received = torch.empty_like(expected)
    group.all_to_all(torch.cat(sent[world.rank]), counts, received).wait()
    assert torch.equal(received, expected)

    if dtype.is_floating_point:
        buffer = everyone[world.rank].clone()
        group.all_reduce(buffer, Sum(scale=0.5)).wait()
        assert torch.equal(buffer, total * 0.5)


def verbs_in_our_memory(world, dtype, cuts):
    """Run the same collectives in buffers that the transport allocated, several calls on each."""
    group, numel = world.collectives, cuts[-1]
    everyone = [values(rank, numel, dtype) for rank in range(world.size)]
    total = sum(everyone[1:], everyone[0].clone())
    own = slice(cuts[world.rank], cuts[world.rank + 1])
    buffer = group.allocate(numel, dtype, torch.device("cpu"))
    into = group.allocate(own.stop - own.start, dtype, torch.device("cpu"))
    assert not buffer.any()
    for source in range(world.size):
        buffer.copy_(everyone[world.rank])
        scattered = group.reduce_scatter(buffer, cuts, into=into)
        scattered.wait()
        assert torch.equal(into, total[own])
        assert torch.equal(buffer, everyone[world.rank])
        scattered.reusable()
        into.copy_(buffer[own])
        buffer[own] = 99
        onto = group.reduce_scatter_onto(into, buffer, cuts)
        onto.wait()
        assert torch.equal(into, total[own])
        onto.reusable()
        buffer.zero_()
        buffer[own] = into
        gathered = group.all_gather(buffer, cuts)
        gathered.wait()
        assert torch.equal(buffer, total)
        gathered.reusable()
        buffer.copy_(everyone[world.rank])
        reduced = group.all_reduce(buffer)
        reduced.wait()
        assert torch.equal(buffer, total)
        reduced.reusable()
        buffer.copy_(everyone[world.rank])
        sent = group.broadcast(buffer, source)
        sent.wait()
        assert torch.equal(buffer, everyone[source])
        sent.reusable()


CUTS = [(2, [0, 3, 7]), (3, [0, 0, 5, 9]), (4, [0, 4, 4, 4, 12])]
LARGE = [(size, [10_007 * cut for cut in cuts]) for size, cuts in CUTS]
"""Sizes for which all dtypes except uint8 use the path for large buffers."""


@each_value(transport=TRANSPORTS, cut=CUTS + LARGE, dtype=DTYPES)
def test_verbs(group, transport, cut, dtype):
    size, cuts = cut
    group(size, transport=transport)(verbs, dtype, cuts)


@each_value(transport=TRANSPORTS, cut=[CUTS[1], LARGE[1], LARGE[2]], dtype=DTYPES)
def test_verbs_in_memory_of_the_transport(group, transport, cut, dtype):
    size, cuts = cut
    group(size, transport=transport)(verbs_in_our_memory, dtype, cuts)


def reused_at_once(world, length):
    """Overwrite sent memory as soon as it is reusable, while slower ranks have not read it yet."""
    group, size = world.collectives, world.size
    counts = [[length] * size] * size
    expected = torch.arange(size).repeat_interleave(length).double()
    private = torch.empty(size * length, dtype=torch.float64)
    ours = group.allocate(size * length, torch.float64, torch.device("cpu"))
    for sent in (private, ours):
        for _ in range(3):
            received = torch.empty_like(expected)
            sent.fill_(world.rank)
            handle = group.all_to_all(sent, counts, received)
            time.sleep(0.02 * world.rank)
            handle.reusable()
            sent.fill_(-1)
            handle.wait()
            assert torch.equal(received, expected)


@pytest.mark.parametrize("length", [3, 5_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sent_rows_may_be_overwritten_once_reusable(group, transport, length):
    group(3, transport=transport)(reused_at_once, length)


def many_in_flight(world, length):
    group = world.collectives
    buffers = [values(world.rank + 10 * i, length + i, torch.float64) for i in range(20)]
    handles = [
        group.all_reduce(buffer)
        if i % 2
        else group.reduce_scatter(buffer, [0, 10, *[length + i] * (world.size - 1)])
        for i, buffer in enumerate(buffers)
    ]
    for handle in handles:  # the second halves start in this order on every rank
        handle.advance()
    for handle in reversed(handles):
        handle.wait()
    for i, buffer in enumerate(buffers):
        parts = [values(rank + 10 * i, length + i, torch.float64) for rank in range(world.size)]
        total = sum(parts)
        mine = slice(0, 10) if world.rank == 0 else slice(10, length + i)
        part = slice(None) if i % 2 else mine if world.rank < 2 else slice(0, 0)
        assert torch.equal(buffer[part], total[part])


@pytest.mark.parametrize("length", [40, 20_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_in_flight_waited_for_in_any_order(group, transport, length):
    for _ in range(5):
        group(3, transport=transport)(many_in_flight, length)


def overlapping(world, rounds):
    """Overwrite the buffers of overlapping all-reduces once they are reusable, in any order."""
    group, size = world.collectives, world.size
    common, own = random.Random(5), random.Random(world.rank)
    longest = shared_memory.SUMMED_EVERYWHERE // 8 // size
    for _ in range(rounds):
        calls = []
        for number in range(common.randint(1, 4)):
            numel = common.randint(INLINE // 8 + 1, longest)
            buffer = torch.empty(numel, dtype=torch.float64)
            if common.random() < 0.5:
                buffer = group.allocate(numel, torch.float64, torch.device("cpu"))
            everyone = [values(rank + 10 * number, numel, torch.float64) for rank in range(size)]
            buffer.copy_(everyone[world.rank])
            calls.append((group.all_reduce(buffer), buffer, sum(everyone)))
        own.shuffle(calls)
        for handle, buffer, total in calls:
            if own.random() < 0.1:
                time.sleep(0.002)
            handle.wait()
            assert torch.equal(buffer, total)
            handle.reusable()
            buffer.fill_(-1)


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_of_overlapping_sums_may_be_overwritten_once_reusable(group, size):
    group(size, transport="shared")(overlapping, 30)


def allocations(world, numel):
    """Return how often this rank allocates shared memory in 30 calls that publish copies."""
    group, arena = world.collectives, world.collectives.buffers.arena
    ours = group.allocate(numel, torch.float32, torch.device("cpu"))
    private, count, allocate = torch.zeros(numel), 0, arena.allocate

    def counted(*given, **keywords):
        nonlocal count
        count += 1
        return allocate(*given, **keywords)

    arena.allocate = counted
    try:
        for buffer in (ours, private):
            for _ in range(15):
                handle = group.all_reduce(buffer)
                handle.wait()
                handle.reusable()
        group.barrier()
    finally:
        del arena.allocate
    return count


@pytest.mark.parametrize("numel", [12_000, 400_000])
def test_copies_reuse_shared_memory(group, numel):
    """A rank may start a call before the others have finished the one before."""
    assert max(group(2, transport="shared")(allocations, numel)) <= 3


def many_calls(world):
    """Run small and large calls of each kind, and return the state that Gloo keeps for them."""
    group = world.collectives
    for step in range(3 * gloo_exchange.REMEMBERED):
        numel = (3, 300, 6_000)[step % 3]
        buffer = torch.ones(numel) if step % 2 else torch.ones(numel, dtype=torch.bfloat16)
        group.all_reduce(buffer).wait()
        assert buffer.eq(world.size).all()
        group.all_gather(buffer, even_cuts(numel, world.size)).wait()
    return len(group.messages._sent), len(group.messages._unwaited)


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_kept_of_calls_that_are_over(group, size):
    assert group(size, transport="gloo")(many_calls) == [(gloo_exchange.REMEMBERED, 0)] * size


def half_precision(world, numel):
    """Sum 0.1 four times in bf16, where rounding after each addition would show."""
    buffer = torch.full((numel,), 0.1 * (1 + world.rank), dtype=torch.bfloat16)
    exact = sum(
        torch.full((numel,), 0.1 * (1 + rank), dtype=torch.bfloat16).float()
        for rank in range(world.size)
    )
    world.collectives.all_reduce(buffer).wait()
    assert torch.equal(buffer, exact.bfloat16())


@pytest.mark.parametrize("numel", [8, 80_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_precision_sums_in_fp32(group, transport, numel):
    group(4, transport=transport)(half_precision, numel)


def sums_of_both_verbs(world, numel):
    """Return this rank's interval from a reduce-scatter and from an all-reduce."""
    group, cuts = world.collectives, even_cuts(numel, world.size)
    own = slice(cuts[world.rank], cuts[world.rank + 1])
    scattered, reduced = (values(world.rank, numel, torch.float32) for _ in range(2))
    group.reduce_scatter(scattered, cuts).wait()
    group.all_reduce(reduced).wait()
    assert torch.equal(scattered[own], reduced[own])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numel", [1, 300, 2_500_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_verbs_sum_in_one_order(group, transport, numel, size):
    group(size, transport=transport)(sums_of_both_verbs, numel)


def sums_between_waits(world):
    """Return the reported waits of this thread while it adds each chunk of a sum."""
    group, waits = world.collectives, world.collectives.status_server.waits
    buffer, found, usual = torch.ones(2_500_000), [], ordered_sums._sum

    def adding(*given):
        found.append(waits.of(threading.get_ident()))
        usual(*given)

    ordered_sums._sum = adding
    try:
        group.reduce_scatter(buffer, even_cuts(buffer.numel(), world.size)).wait()
    finally:
        ordered_sums._sum = usual
    assert len(found) > 2
    assert set(found) == {None}


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_sums_does_not_wait(group, size):
    group(size, transport="gloo")(sums_between_waits)


def helpers():
    return {t for t in threading.enumerate() if t.name in ("shardwise-send", "shardwise-progress")}


def closed_and_forgotten(world):
    """Create two separate groups, and close only one of them."""
    before = helpers()
    for close in (True, False):
        group, buffer = world.collectives.second_group(), torch.ones(100_000)
        group.all_reduce(buffer).wait()
        group.barrier()
        threads = helpers() - before
        assert len(threads) == 2
        if close:
            group.close()
            with pytest.raises(CollectiveError, match="has already closed its connections"):
                group.all_reduce(buffer)
            with pytest.raises(CollectiveError, match="has already closed its connections"):
                group.barrier()
        del group
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    world.barrier()


def test_groups_that_are_gone_leave_no_thread(group):
    group(2, transport="gloo")(closed_and_forgotten)


def unlike_calls(world, which):
    """Run a sum on one rank and a different collective on the other."""
    group, large = world.collectives, torch.ones(50_000)
    world.barrier()
    if world.rank == 0:
        group.all_reduce(large).wait()
    elif which == "other call":
        group.reduce_scatter(large, [0, 10, 50_000]).wait()
    elif which == "other length":
        group.all_reduce(torch.ones(40_000)).wait()
    elif which == "other dtype":
        group.all_reduce(large.double()).wait()
    else:
        group.all_reduce(torch.ones(40)).wait()


@pytest.mark.parametrize(
    "which",
    ["other call", pytest.param("other length", marks=pytest.mark.full), "other dtype", "small"],
)
def test_two_ranks_in_unlike_calls_are_told(group, which):
    for error in group(2, transport="gloo").errors(unlike_calls, which):
        assert error is not None
        kind, message = error
        assert kind == CollectiveError.__name__, message
        assert re.search(r"Call \d+ is .* on rank [01] and .* on rank [01], of 2\.", message)


def in_tree(world, numel, dtype):
    """Sum numbers that any other order would round differently, in the order of the tree."""
    group, cuts = world.collectives, even_cuts(numel, world.size)
    own = slice(cuts[world.rank], cuts[world.rank + 1])
    draws = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    leaves = [torch.randn(numel, generator=draw).to(dtype) for draw in draws]
    total = sum_tree.fold(
        [leaf.to(torch.promote_types(dtype, torch.float32)) for leaf in leaves], add
    )
    buffer = leaves[world.rank].clone()
    group.all_reduce(buffer, Sum(in_tree=True)).wait()
    assert torch.equal(buffer, total.to(dtype))
    buffer, into = leaves[world.rank].clone(), torch.empty(own.stop - own.start, dtype=dtype)
    group.reduce_scatter(buffer, cuts, Sum(in_tree=True), into=into).wait()
    assert torch.equal(into, total.to(dtype)[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [40, 200_000])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_in_a_tree(group, transport, size, numel, dtype):
    group(size, transport=transport)(in_tree, numel, dtype)


def objects(world):
    gathered = world.gather({"rank": world.rank, "data": "x" * world.rank})
    assert gathered == [{"rank": r, "data": "x" * r} for r in range(world.size)]
    assert world.gather("y" * 100_000 * world.rank)[2] == "y" * 200_000
    assert world.broadcast_object(world.rank + 5, source=1) == 6
    assert world.any(world.rank == 1)
    assert not world.any(False)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_objects(group, transport):
    group(3, transport=transport)(objects)


def rows(world, length):
    row = torch.arange(length, dtype=torch.float64) + world.rank
    gathered = world.collectives.gather_rows(row)
    assert torch.equal(gathered, torch.arange(length).double() + torch.arange(world.size)[:, None])


@pytest.mark.parametrize("length", [1, 50_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows(group, transport, length):
    group(3, transport=transport)(rows, length)


def groups_of_their_own(world):
    """Check that separate groups do not wait for each other or receive each other's messages."""
    first, second = world.collectives, world.side_channel
    buffers = [torch.full((30_000,), world.rank + scale) for scale in (1.0, 10.0)]
    order = [(first, buffers[0]), (second, buffers[1])]
    handles = [group.all_reduce(b) for group, b in (order if world.rank else order[::-1])]
    for handle in handles:
        handle.wait()
    assert [float(b[0]) for b in buffers] == [6.0, 33.0]
    pair = first.split([[2, 0]])
    row = pair.gather_rows(torch.tensor([float(world.rank)]))
    assert row.flatten().tolist() == ([1.0] if world.rank == 1 else [0.0, 2.0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_of_their_own(group, transport):
    group(3, transport=transport)(groups_of_their_own)


def a_rank_leaves(world):
    if world.rank == 1:
        import os

        os._exit(0)
    world.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves_is_named(group, transport):
    error = group(2, transport=transport).errors(a_rank_leaves)[0]
    assert error is not None
    kind, message = error
    assert kind == PeerLost.__name__
    assert "Rank 0 of 2 lost rank 1 in" in message


def pieces_case(world, seed):
    """Check that buffers give identical bits if some pieces are stored elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    group, numel = world.collectives, int(torch.randint(1, 20_000, (), generator=draw))
    ends = torch.randint(0, numel + 1, (7,), generator=draw).sort().values.tolist()
    borders = torch.randint(0, numel + 1, (world.size - 1,), generator=draw).sort().values.tolist()
    cuts = [0, *borders, numel]
    mine = torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + world.rank))
    whole = [mine.clone(), mine.clone()]
    group.all_reduce(whole[0]).wait()
    group.reduce_scatter(whole[1], cuts).wait()
    own = slice(cuts[world.rank], cuts[world.rank + 1])

    def pieces(buffer):
        """Return pieces outside the buffer, where they are blank. They differ between ranks."""
        found = []
        for number, (first, end) in enumerate(pairwise([0, *ends, numel])):
            if (number + world.rank) % 3:
                found.append(mine[first:end].clone())
                buffer[first:end] = torch.nan
            else:
                found.append(buffer[first:end])
        return found

    buffer = mine.clone()
    group.all_reduce_pieces(pieces(buffer), buffer).wait()
    assert torch.equal(buffer, whole[0])
    buffer = mine.clone()
    group.reduce_scatter_pieces(pieces(buffer), buffer, cuts).wait()
    assert torch.equal(buffer[own], whole[1][own])
    buffer, into = mine.clone(), torch.empty(own.stop - own.start)
    group.reduce_scatter_pieces(pieces(buffer), buffer, cuts, into=into).wait()
    assert torch.equal(into, whole[1][own])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pieces_from_elsewhere(group, transport, size):
    for seed in range(8):
        group(size, transport=transport)(pieces_case, seed)


def short_messages(world, seed):
    """Run the same case with pieces that are split into several messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "LONG", 4000)
        pieces_case(world, seed)


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_in_several_messages(group, size):
    for seed in range(8):
        group(size, transport="gloo")(short_messages, seed)


def connect_to_what_listens(world):
    """Return, for each port of this process, whether a stranger can still connect to it."""
    found = {}
    for listener in listeners._tcp_sockets():
        with listener:
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            host, port = listener.getsockname()
        try:
            socket.create_connection((host, port), timeout=0.3).close()
        except TimeoutError:
            found[port] = False
        else:
            found[port] = True
    world.barrier()
    return found, world.collectives.status_server._places[world.rank].port


@pytest.mark.skipif(sys.platform != "linux", reason="filters on sockets are Linux's")
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_nobody_can_connect_to_gloo_once_ranks_have(group, transport):
    for found, watch in group(2, transport=transport)(connect_to_what_listens):
        assert found.pop(watch)
        assert found
        assert not any(found.values())
