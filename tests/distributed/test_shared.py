"""Properties of the shared-memory transport: one memory, exact bits, faults, no leftovers."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import shared_buffers, shared_memory, shared_work
from shardwise.errors import PeerLost
from shardwise.layout.bucket_layout import even_cuts

CPU = torch.device("cpu")
LARGE = 300_000


def transport_of(world):
    return world.collectives.name


def test_ranks_of_one_host_share_memory_by_themselves(group):
    assert group(2)(transport_of) == ["shared memory"] * 2
    assert group(2, transport="gloo")(transport_of) == ["gloo"] * 2


# -- memory -----------------------------------------------------------------------------------


def one_memory(world):
    group = world.collectives
    common = group.common(LARGE, torch.float32, CPU)
    assert not common.any()
    cuts = even_cuts(LARGE, world.size)
    group.barrier()
    common[cuts[world.rank] : cuts[world.rank + 1]] = world.rank + 1.0
    group.barrier()
    counts = [int((common == rank + 1.0).sum()) for rank in range(world.size)]
    assert counts == [b - a for a, b in pairwise(cuts)]
    group.broadcast(common, source=1).wait()
    group.all_gather(common, cuts).wait()
    assert int((common == 1.0).sum()) == counts[0]


def test_common_memory_is_one(group):
    group(3)(one_memory)


def segments():
    with open("/proc/self/maps") as maps:
        return sum("memfd:shardwise" in line for line in maps)


def memory_comes_and_goes(world):
    group = world.collectives
    group.barrier()
    before = segments()
    for _ in range(3):
        large = group.allocate(shared_buffers.POOLED, torch.float32, CPU)
        common = group.common(LARGE, torch.float32, CPU)
        group.all_reduce(large).reusable()
        assert segments() > before
        del large, common
        gc.collect()
        group.barrier()  # on the way: that these segments have ended
        group.barrier()
    assert segments() <= before + 1


def test_memory_that_nobody_holds_is_given_back_on_all_ranks(group):
    group(2)(memory_comes_and_goes)


def memory_is_used_again(world):
    group = world.collectives
    kept = group.allocate(LARGE, torch.float32, CPU).fill_(3)
    before = segments()
    for _ in range(30):
        large = group.allocate(shared_buffers.POOLED, torch.uint8, CPU)
        assert not large.any(), "it is not blank"
        large.fill_(1)
        del large
    assert segments() <= before + 1
    child = os.fork()
    if not child:
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    assert bool((kept == 3).all()), "a forked process has let go of its parent's memory"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_memory_is_used_again(group):
    group(2)(memory_is_used_again)


def leaves_while_others_read(world):
    """A rank that closes a group does not free memory that another rank still reads."""
    group = world.collectives.split([range(world.size)])
    beside = group.allocate(LARGE, torch.float32, CPU)  # so that the segment lives on
    usual = shared_buffers.SharedBuffers.read

    def late(self, *args):
        found = usual(self, *args)
        time.sleep(0.3)
        return found

    if world.rank == 1:
        shared_buffers.SharedBuffers.read = late
    try:
        whole = torch.zeros(2 * LARGE)
        own = slice(world.rank * LARGE, (world.rank + 1) * LARGE)
        whole[own] = world.rank + 1.0
        group.all_gather(whole, [0, LARGE, 2 * LARGE]).wait()
    finally:
        shared_buffers.SharedBuffers.read = usual
    group.close()
    gc.collect()
    assert float(whole.sum()) == 3.0 * LARGE
    world.barrier()
    assert not beside.any()


def test_what_is_read_outlasts_the_rank_that_showed_it(group):
    group(2)(leaves_while_others_read)


def descriptors():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the descriptor that listed them
    return sorted(target for target in found if "memfd" in target or "socket" in target)


def leaves_nothing(world):
    group = world.collectives
    before, threads = descriptors(), threading.active_count()
    other = group.split([range(world.size)])
    buffer = other.allocate(LARGE, torch.float32, CPU)
    other.all_reduce(buffer).wait()
    other.all_reduce(torch.ones(LARGE)).wait()
    assert threading.active_count() == threads
    group.barrier()
    other.close()
    del buffer
    gc.collect()
    assert len(descriptors()) <= len(before) + 1  # at most one more segment of the arena


def test_a_group_that_is_closed_leaves_nothing(group):
    group(3)(leaves_nothing)


# -- bits -------------------------------------------------------------------------------------


def sums_under_random_delays(world, seed):
    """Return the bytes of sums that would show a change of order, with random delays."""
    group, draw = world.collectives, torch.Generator().manual_seed(world.rank)
    late = random.Random(100 * seed + world.rank)
    kept = [group.allocate(LARGE, torch.float32, CPU) for _ in range(4)]
    results = []
    for _ in range(3):
        handles = []
        for number, buffer in enumerate(kept):
            buffer.copy_(torch.randn(LARGE, generator=draw))
            time.sleep(late.random() * 0.005)
            if number % 2:
                handles.append(group.all_reduce(buffer))
            else:
                handles.append(group.reduce_scatter(buffer, even_cuts(LARGE, world.size)))
        late.shuffle(handles)
        for handle in handles:
            time.sleep(late.random() * 0.005)
            handle.wait()
        for handle in handles:
            handle.reusable()
        results += [hash(buffer.numpy().tobytes()) for buffer in kept]
    return results


def test_sums_are_bit_equal_whoever_is_late(group, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ranks = group(3, seed=1)
    first = ranks(sums_under_random_delays, 0)
    for seed in range(1, 6):
        assert ranks(sums_under_random_delays, seed) == first


# -- faults -----------------------------------------------------------------------------------


def different_calls(world, verbs):
    buffer = torch.ones(LARGE)
    if verbs[world.rank] == "gather":
        world.collectives.all_gather(buffer, even_cuts(LARGE, world.size)).wait()
    elif verbs[world.rank] == "reduce":
        world.collectives.all_reduce(buffer).wait()
    elif verbs[world.rank] == "short":
        world.collectives.all_reduce(buffer[:-1]).wait()
    elif verbs[world.rank] == "double":
        world.collectives.all_reduce(buffer.double()).wait()
    else:
        cuts = [0, *[LARGE] * world.size]
        world.collectives.all_gather(buffer, cuts).wait()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("gather", "all-gather of 300000 float32 values"),
        ("short", "all-reduce of 299999 float32 values"),
        ("double", "all-reduce of 300000 float64 values"),
    ],
)
def test_different_calls_are_named_at_once_on_both(group, other, said):
    begun = time.monotonic()
    for rank, error in enumerate(group(2).errors(different_calls, ["reduce", other])):
        kind, message = error
        assert kind == "CollectiveError"
        mine, theirs = ("all-reduce of 300000 float32 values", said)[:: 1 - 2 * rank]
        assert f"is {mine} on rank {rank} and {theirs} on rank {1 - rank}, of 2" in message
    assert time.monotonic() - begun < 30


def test_different_cuts_are_named(group):
    for kind, message in group(2).errors(different_calls, ["gather", "cut"]):
        assert kind == "CollectiveError"
        assert "cut otherwise" in message


def stop_myself(number, seconds=0.0):
    """Get a signal; one that stops is taken back after `seconds`."""
    if seconds:
        waken = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {signal.SIGCONT})"
        subprocess.Popen([sys.executable, "-S", "-c", waken])
    os.kill(os.getpid(), number)


def fault(world, phase, number, seconds):
    """Rank 1 gets a signal in the middle of `phase`."""
    group, cuts = world.collectives, even_cuts(LARGE, world.size)
    buffer = group.allocate(LARGE, torch.float32, CPU)
    if world.rank == 1:
        place, name = {
            "reduce-scatter": (shared_memory, "sum_in_rank_order"),
            "all-reduce": (shared_memory.GroupWork, "announce"),
            "all-gather": (shared_buffers.SharedBuffers, "read"),
            "exchange of rows": (shared_memory.GroupWork, "post"),
        }[phase]
        whole = getattr(place, name)

        def broken(*args, **options):
            setattr(place, name, whole)
            stop_myself(number, seconds)
            return whole(*args, **options)

        setattr(place, name, broken)
    if phase == "reduce-scatter":
        group.reduce_scatter(buffer, cuts).reusable()
    elif phase == "all-reduce":
        group.all_reduce(buffer).wait()
    elif phase == "all-gather":
        group.all_gather(buffer, cuts).reusable()
    else:
        group.gather_rows(torch.ones(3))


PHASES = ["reduce-scatter", "all-reduce", "all-gather", "exchange of rows"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_inside_a_collective_is_named_at_once(group, phase):
    begun = time.monotonic()
    errors = group(3).errors(fault, phase, signal.SIGKILL, 0.0)
    for rank in (0, 2):
        kind, message = errors[rank]
        assert kind == "PeerLost"
        assert message.startswith(f"Rank {rank} of 3 ")
        assert f"lost rank 1 in {phase}" in message
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "phase",
    [
        *(pytest.param(phase, marks=pytest.mark.full) for phase in PHASES[:2]),
        *PHASES[2:],  # the others stop as all-gather does
    ],
)
def test_a_rank_that_is_stopped_inside_a_collective_is_named_in_time(group, phase):
    errors = group(2, timeout=1.0).errors(fault, phase, signal.SIGSTOP, 3.0)
    kind, message = errors[0]
    assert kind == "CollectiveError"
    assert f"Rank 0 of 2 waited 1 s in {phase}" in message
    assert "for rank 1, which did not join" in message


def dies_beside_a_child(world):
    """Fork a process from rank 1, like a DataLoader worker, that outlives the rank."""
    child = os.fork() if world.rank == 1 else -1
    if child == 0:
        time.sleep(60)
        os._exit(0)
    child = max(world.gather(child))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(PeerLost, match="lost rank 1 in barrier"):
            world.barrier()
    finally:
        os.kill(child, signal.SIGKILL)  # and so it has lived until here


def test_a_dead_rank_is_found_although_a_forked_worker_lives(group):
    assert group(2).errors(dies_beside_a_child) == [None, ("Died", "exit code -9")]


def forks(world):
    """A forked child closes only its own copy, so the ranks continue."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    total = world.collectives.allocate(LARGE, torch.float32, CPU).fill_(1.0)
    world.collectives.all_reduce(total).wait()
    assert float(total[0]) == world.size


def test_ranks_go_on_after_a_fork(group):
    group(2)(forks)


def test_flights_have_a_name_for_every_kind():
    assert len(shared_work.KINDS) == len(set(shared_work.KINDS)) < 256


def settles(world):
    """Launch a sum, and wait in torch's barrier on rank 0 while rank 1 waits for the sum."""
    group = world.collectives
    buffer = group.allocate(1 << 16, torch.float32, torch.device("cpu")).fill_(world.rank + 1.0)
    dist.barrier()
    if world.rank == 1:
        time.sleep(0.5)  # so that rank 0 cannot do its part when it launches the sum
    call = group.reduce_scatter(buffer, [0, 1 << 15, 1 << 16])
    if world.rank == 0:
        group.settle()
        dist.barrier()
    call.wait()
    call.reusable()
    if world.rank == 1:
        dist.barrier()
    return buffer[world.rank << 15].item()


def test_rank_in_a_collective_of_torch_delays_no_other_one(group):
    assert group(2)(settles, limit=60) == [3.0, 3.0]
