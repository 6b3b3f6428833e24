"""Intervals in pinned memory share a few blocks, because torch rounds each up to a power of two."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm import Solo
from shardwise.layout.placement import Tier
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.tiers.copy_stream import ALIGNED, CopyStream, packed

KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("sizes", "blocks", "places"),
    [
        ([], [], []),
        ([0], [512], [(0, 0)]),
        ([512], [512], [(0, 0)]),
        ([513], [1024], [(0, 0)]),
        ([3 * KB, 3 * KB, 2 * KB], [8 * KB], [(0, 0), (0, 3 * KB), (0, 6 * KB)]),
        ([4 * KB, KB], [4 * KB, KB], [(0, 0), (1, 0)]),
        ([3 * KB] * 4, [8 * KB, 4 * KB, 4 * KB], [(0, 0), (0, 3 * KB), (1, 0), (2, 0)]),
        ([3 * KB] * 5, [16 * KB], [(0, n * 3 * KB) for n in range(5)]),
    ],
)
def test_packed(sizes, blocks, places):
    assert packed(sizes) == (blocks, places)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_intervals_are_disjoint_and_inside_blocks(sizes):
    blocks, places = packed(sizes)
    assert all(size & (size - 1) == 0 for size in blocks)
    ends = [0] * len(blocks)
    for size, (block, first) in zip(sizes, places, strict=True):
        assert first % ALIGNED == 0
        assert first >= ends[block]
        ends[block] = first + size
    assert all(end <= size for end, size in zip(ends, blocks, strict=True))


@pytest.mark.parametrize("each", [17 * MB, 25 * MB, 33 * MB])
def test_many_buckets_take_little_more_than_their_bytes(each):
    """In a separate block, each bucket would take up to twice its size."""
    sizes = [each] * 100
    blocks, _ = packed(sizes)
    assert sum(blocks) <= 1.05 * sum(sizes)


class OnAnAccelerator(StorageFactory):
    """Stores states of the CPU as if it were an accelerator."""

    def is_apart(self, device):
        return True


def test_states_of_one_kind_share_blocks():
    factory = OnAnAccelerator(Tier("cpu"), Solo())
    lengths, cpu = [1000, 1000, 3000, 50, 1000], torch.device("cpu")
    kinds = [(torch.float32, cpu)] * 3 + [(torch.bfloat16, cpu)] + [(torch.float32, cpu)]
    made = factory.make("gradients", lengths, kinds)
    assert [each.numel for each in made] == lengths
    assert [each.dtype for each in made] == [dtype for dtype, _ in kinds]
    for number, each in enumerate(made):
        each.memory.fill_(number)
    assert all(bool((each.memory == number).all()) for number, each in enumerate(made))
    assert len({each.memory.untyped_storage().data_ptr() for each in made}) == 3


def test_copy_stream_allocates_requested_memory():
    first, second = CopyStream(torch.device("cpu")).memories([3, 5], torch.float64)
    assert (first.numel(), second.numel(), second.dtype) == (3, 5, torch.float64)


def test_thread_selects_the_device_before_the_stream():
    """Otherwise torch would restore a stream of device 0 on leaving the block."""
    done = []

    @contextmanager
    def noted(what):
        done.append(f"at {what}")
        yield
        done.append(f"from {what}")

    copies = CopyStream(torch.device("cpu"))
    copies.device = torch.device("cuda", 1)
    copies._streams = SimpleNamespace(device=noted, stream=noted)
    with copies._entered("up", ()):
        pass
    assert done == ["at cuda:1", "at up", "from up", "from cuda:1"]
