"""The simulated heap: what is reused, what is not, and what is a mapping of its own."""

from shardwise.tiers.host_memory import MAPPED
from shardwise.tools.plan.heap import ALIGNED, HEADER, Heap

MB = 2**20


def test_a_freed_block_is_too_small_for_one_of_its_size():
    heap = Heap()
    heap.allocate("a", MB)
    heap.allocate("wall", MB)
    heap.free("a")
    heap.allocate("b", MB)
    assert heap.peak == 3 * (MB + HEADER)


def test_a_smaller_block_goes_where_a_larger_one_was():
    heap = Heap()
    heap.allocate("a", MB)
    heap.allocate("wall", MB)
    heap.free("a")
    heap.allocate("b", MB - ALIGNED)
    assert heap.peak == 2 * (MB + HEADER)


def test_neighbours_that_are_free_are_one_block():
    heap = Heap()
    for key in "abc":
        heap.allocate(key, MB)
    heap.free("a")
    heap.free("b")
    heap.allocate("d", 2 * MB - ALIGNED)
    assert heap.peak == 3 * (MB + HEADER)


def test_the_end_of_the_heap_grows():
    heap = Heap()
    heap.allocate("a", MB)
    heap.free("a")
    heap.allocate("b", 2 * MB)
    assert heap.peak == 2 * MB + HEADER


def test_a_large_block_is_returned_when_it_is_freed():
    heap = Heap()
    for _ in range(3):
        heap.allocate("a", MAPPED)
        heap.free("a")
    assert (heap.peak, heap.top) == (MAPPED, 0)
