"""A forked child sees the model as it was at the fork, as in plain PyTorch.

Its parent is not affected by the child's writes.
"""

import errno
import faulthandler
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import arena
from shardwise.comm.shared_buffers import SharedBuffers
from shardwise.comm.shared_work import READY
from shardwise.comm.socket_mesh import MeshMessage

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
transports = pytest.mark.parametrize("transport", ["shared", "gloo"])
replicated = pytest.mark.parametrize("zero", [0, 1])
WIDTH = 64


def make(world, zero):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, sw.Engine(model, optimizer, zero=zero, quiet=True)


def train(world, model, engine, steps):
    x = torch.full((4, WIDTH), 1.0 + world.rank)
    for _ in range(steps):
        engine.backward(model(x).pow(2).mean())
        engine.step()


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Child:
    """Runs `function(*arguments)` in a forked child."""

    def __init__(self, function, *arguments):
        context = multiprocessing.get_context("fork")
        self._answers = context.SimpleQueue()
        self._process = context.Process(target=self._run, args=(function, *arguments))
        self._process.start()

    def _run(self, function, *arguments):
        try:
            answer = function(*arguments)
            self._answers.put(answer.tolist() if isinstance(answer, torch.Tensor) else answer)
        except Exception as error:
            self._answers.put(f"{type(error).__name__}: {error}")

    def answer(self):
        found = self._answers.get()
        self._process.join()
        assert self._process.exitcode == 0
        return found


def evaluates_first_weights(world, zero):
    model, _, engine = make(world, zero)
    first = weights(model)

    def evaluate():
        nn.utils.vector_to_parameters(first, model.parameters())
        return model(torch.ones(1, WIDTH)).item()

    train(world, model, engine, 2)
    if world.rank == 0:
        before = weights(model)
        Child(evaluate).answer()
        assert torch.equal(weights(model), before), "the child has written into its parent"
    train(world, model, engine, 2)
    assert len(set(world.gather(weights(model).sum().item()))) == 1
    engine.close()


@transports
@replicated
def test_child_does_not_write_into_its_parent(group, transport, zero):
    group(2, transport=transport)(evaluates_first_weights, zero)


def snapshot_stays(world, zero):
    model, _, engine = make(world, zero)
    children = []
    for _ in range(2):  # the second fork finds memory that a step has shared again
        train(world, model, engine, 1)
        go = multiprocessing.get_context("fork").Event()
        children.append((weights(model), go, Child(lambda go=go: go.wait() and weights(model))))
    train(world, model, engine, 3)
    for expected, go, child in children:
        go.set()
        assert child.answer() == expected.tolist(), "the child sees its parent's later steps"
    assert len(set(world.gather(weights(model).sum().item()))) == 1
    engine.close()


@transports
@replicated
def test_snapshot_of_a_child_stays_while_its_parent_trains(group, transport, zero):
    group(2, transport=transport)(snapshot_stays, zero)


def forks_beside_training(world, zero):
    """Another thread forks all the time."""
    twin, _, alone = make(world, zero)
    train(world, twin, alone, 12)
    expected = weights(twin)
    alone.close()
    model, _, engine = make(world, zero)
    over = threading.Event()

    def fork():
        while not over.is_set():
            assert Child(lambda: 1).answer() == 1

    thread = threading.Thread(target=fork)
    thread.start()
    train(world, model, engine, 12)
    over.set()
    thread.join()
    assert torch.equal(weights(model), expected)
    engine.close()


@transports
@replicated
def test_forks_in_a_thread_do_not_change_the_training(group, transport, zero):
    group(2, transport=transport)(forks_beside_training, zero)


def child_trains(world, zero):
    def further(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).pow(2).mean().backward()
            optimizer.step()
        return weights(model)

    model, _, engine = make(world, zero)
    train(world, model, engine, 2)
    twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    twin.load_state_dict(model.state_dict())
    expected = further(twin)
    engine.backward(model(torch.ones(4, WIDTH)).pow(2).mean())  # sums of gradients are pending
    before = weights(model)
    assert Child(further, model).answer() == expected.tolist()
    assert torch.equal(weights(model), before)
    engine.step()
    norm = torch.linalg.vector_norm(weights(model) - before).item()
    assert norm > 0
    assert len(set(world.gather(norm))) == 1
    engine.close()


@transports
@replicated
def test_child_trains_on_in_plain_pytorch(group, transport, zero):
    group(2, transport=transport)(child_trains, zero)


def child_is_refused(world, zero):
    model, _, engine = make(world, zero)
    train(world, model, engine, 1)
    loss = model(torch.ones(1, WIDTH)).sum()
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine.save("nowhere")):
        said = Child(call).answer()
        assert f"was forked from rank {world.rank}, and an engine works only in" in said
        assert "UsageError" in said
    for call in (world.barrier, lambda: world.gather(1)):
        assert "is not a rank itself" in Child(call).answer()
    train(world, model, engine, 1)
    engine.close()


@transports
def test_collectives_and_engines_are_refused_in_a_child(group, transport):
    group(2, transport=transport)(child_is_refused, 1)


def sharded_in_a_child(world):
    model, _, engine = make(world, 3)
    train(world, model, engine, 1)
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        expected = model(x).item()
    go = multiprocessing.get_context("fork").Event()
    with engine.full_parameters():
        child = Child(lambda: go.wait() and model(x).item())
    train(world, model, engine, 1)
    go.set()
    assert child.answer() == expected
    assert "ParameterAccess" in Child(lambda: model(x).item()).answer()
    train(world, model, engine, 1)
    engine.close()


@transports
def test_child_of_a_block_has_sharded_parameters_and_others_are_refused(group, transport):
    group(2, transport=transport)(sharded_in_a_child)


def shares_again(world):
    model, _, engine = make(world, 1)
    train(world, model, engine, 1)
    numbers = []
    for _ in range(3):
        Child(lambda: 1).answer()
        train(world, model, engine, 1)
        numbers.append(_maps_of_arenas())
        for parameter in model.parameters():
            assert world.collectives.buffers.arena.locate(parameter), "a step would copy it"
    assert numbers[0] == numbers[1] == numbers[2], "memory that only a child saw is still held"
    engine.close()


def _maps_of_arenas():
    with open("/proc/self/maps") as maps:
        return sum("memfd:shardwise" in line for line in maps)


def test_step_after_a_fork_shares_parameters_again(group):
    group(2, transport="shared")(shares_again)


def subprocesses(world):
    model, _, engine = make(world, 1)
    before = weights(model)
    ran = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True)
    assert ran.stdout == b"1\n"
    subprocess.run(["true"], preexec_fn=os.getpid, check=True)  # which forks by Python's hooks
    assert torch.equal(weights(model), before)
    train(world, model, engine, 1)
    engine.close()


@transports
def test_subprocesses_leave_the_run_alone(group, transport):
    group(2, transport=transport)(subprocesses)


def _files_of_arenas():
    """Return the inodes of the segment files that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:shardwise" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(os.stat(f"/proc/self/fd/{fd}").st_ino)
        except OSError:
            continue  # the descriptor that listed them
    return found


def test_no_descriptor_keeps_the_file_of_before_a_fork():
    before = _files_of_arenas()
    own = arena.Arena()
    tensor = own.allocate(1000, torch.float32, forkable=True).fill_(2)
    (first,) = set(_files_of_arenas()) - set(before)
    assert _files_of_arenas().count(first) == 1, "a second descriptor holds the file"
    assert Child(lambda: first in _files_of_arenas()).answer() is False
    arena.share_again()
    assert first not in _files_of_arenas()
    assert tensor.sum().item() == 2000.0


def test_segment_of_another_rank_is_mapped_without_a_descriptor():
    before = _files_of_arenas()
    own, others = arena.Arena(), arena.MappedSegments()
    tensor = own.allocate(1000, torch.float32).fill_(2)
    segment, offset = own.locate(tensor)
    others.learn(1, segment.number, os.dup(segment.fd))
    assert len(_files_of_arenas()) == len(before) + 1
    assert others.view(1, segment.number, offset, 1000, torch.float32).sum().item() == 2000.0


def test_fork_makes_forkable_memory_private_until_it_is_shared_again():
    own = arena.Arena()
    tensor = own.allocate(1000, torch.float32, forkable=True).fill_(2)
    other = own.allocate(1000, torch.float32)
    assert own.locate(tensor)[0] is not own.locate(other)[0]
    number = own.locate(tensor)[0].number
    child = Child(lambda: (tensor.add_(1).sum().item(), other.sum().item()))
    assert child.answer() == (3000.0, 0.0)
    assert own.locate(tensor) is None
    assert own.locate(other) is not None
    tensor.add_(5)
    arena.share_again()
    assert own.locate(tensor)[0].number > number
    assert not own.holds(number)
    assert tensor.sum().item() == 7000.0


def test_child_without_its_parameters_ends_when_it_uses_them(monkeypatch, capfd):
    """The host refuses private memory to one of two segments."""
    own, other = arena.Arena(), arena.Arena()
    tensor = own.allocate(1000, torch.float32, forkable=True).fill_(2)
    kept = other.allocate(1000, torch.float32, forkable=True).fill_(3)
    refused, map_over = own.locate(tensor)[0].start, arena._map_over

    def refuse(start, size, flags, fd=-1, access=arena.READ_WRITE):
        if start == refused and flags & mmap.MAP_PRIVATE and fd >= 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        map_over(start, size, flags, fd, access)

    monkeypatch.setattr(arena, "_map_over", refuse)
    assert Child(lambda: kept.sum().item()).answer() == 3000.0
    assert "was forked without the model's parameters" in capfd.readouterr().err
    process = multiprocessing.get_context("fork").Process(
        target=lambda: (faulthandler.disable(), tensor.sum())
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGSEGV
    assert own.locate(tensor) is not None, "the parent's memory is shared as before"
    assert tensor.sum().item() == 2000.0
    own.close()
    assert tensor.sum().item() == 2000.0


@pytest.mark.parametrize("forked_before_collection", [True, False])
def test_tensor_collected_during_share_leaves_zeros(monkeypatch, forked_before_collection):
    own = arena.Arena()
    kept = own.allocate(3, torch.float32, forkable=True).fill_(2)
    collected = [own.allocate(3, torch.float32, forkable=True).fill_(5)]
    Child(lambda: 1).answer()
    write = os.pwrite

    def write_then_collect(fd, values, offset):
        written = write(fd, values, offset)
        collected.clear()  # by another thread: os.pwrite does not hold the interpreter's lock
        return written

    monkeypatch.setattr(os, "pwrite", write_then_collect)
    arena.share_again()
    if forked_before_collection:
        Child(lambda: 1).answer()
        arena.share_again()
    assert own.allocate(3, torch.float32, forkable=True).tolist() == [0.0, 0.0, 0.0]
    assert kept.tolist() == [2.0, 2.0, 2.0]


def test_tensor_collected_while_another_thread_forks_is_taken_back():
    own = arena.Arena()
    kept = own.allocate(3, torch.float32, forkable=True)
    tensor = own.allocate(3, torch.float32, forkable=True).fill_(5)
    segment = own.locate(kept)[0]
    segment.make_private()
    segment.is_private = False  # as the collecting thread has read it just before
    at = tensor.data_ptr()
    del tensor
    segment.is_private = True
    arena.share_again()
    taken = own.allocate(3, torch.float32, forkable=True)
    assert (taken.data_ptr(), taken.tolist()) == (at, [0.0, 0.0, 0.0])


def test_fork_during_publish_makes_it_copy(monkeypatch):
    own = arena.Arena()
    tensor = own.allocate(3, torch.float32, forkable=True).fill_(2)
    posts = []
    work = types.SimpleNamespace(post=posts.append)
    buffers = SharedBuffers(own, work, 0, 2)
    locate = own.locate

    def locate_then_fork(*arguments, **more):
        place = locate(*arguments, **more)
        own.make_private()
        return place

    monkeypatch.setattr(own, "locate", locate_then_fork)
    for _ in range(2):
        public = buffers.publish(MeshMessage(1, READY), tensor)
        assert public.tolist() == [2.0, 2.0, 2.0]
    assert posts[0].segment != posts[1].segment


def test_memory_that_ranks_write_in_a_call_cannot_become_private():
    own = arena.Arena()
    tensor = own.allocate(3, torch.float32, forkable=True).fill_(2)
    buffers = SharedBuffers(own, types.SimpleNamespace(post=lambda message: None), 0, 2)
    public = buffers.publish(MeshMessage(1, READY), tensor, written=True)
    own.make_private()
    assert own.locate(public) is not None


def test_segment_that_ends_while_it_is_shared_again_is_forgotten(monkeypatch):
    own = arena.Arena()
    collected = [own.allocate(3, torch.float32, forkable=True)]
    number = own.locate(collected[0])[0].number
    own.make_private()
    share = arena.Segment.share

    def share_then_collect(segment, new):
        done = share(segment, new)
        collected.clear()
        return done

    monkeypatch.setattr(arena.Segment, "share", share_then_collect)
    arena.share_again()
    assert not any(own.holds(each) for each in range(number, number + 3))
