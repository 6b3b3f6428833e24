"""The detector itself: which sequences are in order, and which are not."""

import pytest

from tests.phantom.clocks import HOST
from tests.phantom.order import Order, Span

WHOLE, FRONT, BACK = Span(1000, 1000, 1100), Span(1000, 1000, 1050), Span(1000, 1050, 1100)


def kernel(stream, reads=(), writes=()):
    return lambda order: order.kernel(stream, "kernel", reads, writes)


def by_host(reads=(), writes=()):
    return lambda order: order.by_host("loop", reads, writes)


def wait(stream, other):
    return lambda order: order.wait(stream, order.moment(other))


def sync(stream):
    return lambda order: order.synchronize(order.moment(stream), "stream")


def recorded(stream):
    return lambda order: order.record_stream(1000, stream)


def freed(order):
    order.freed(1000)


WRITE, READ = kernel("main", writes=[WHOLE]), kernel("side", reads=[WHOLE])

CASES = {
    "one stream is in order": ([WRITE, kernel("main", [WHOLE])], 0),
    "another one is not": ([WRITE, READ], 1),
    "but when it waits": ([WRITE, wait("side", "main"), READ], 0),
    "a wait before says nothing": ([wait("side", "main"), WRITE, READ], 1),
    "two read": ([kernel("main", [WHOLE]), READ], 0),
    "two write": ([WRITE, kernel("side", writes=[WHOLE])], 1),
    "a write over a read": ([READ, WRITE], 1),
    "other bytes": ([kernel("main", writes=[FRONT]), kernel("side", [BACK])], 0),
    "some of the bytes": ([kernel("main", writes=[FRONT]), READ], 1),
    "by way of a third": ([WRITE, wait("third", "main"), wait("side", "third"), READ], 0),
    "by way of the host": ([WRITE, sync("main"), READ], 0),
    "the host reads too early": ([WRITE, by_host([WHOLE])], 1),
    "the host waits": ([WRITE, sync("main"), by_host([WHOLE])], 0),
    "the host waits for another": ([WRITE, sync("side"), by_host([WHOLE])], 1),
    "the host writes over a read": ([kernel("main", [WHOLE]), by_host(writes=[WHOLE])], 1),
    "the host wrote before": ([by_host(writes=[WHOLE]), kernel("main", [WHOLE])], 0),
    "a later write hides no race": ([READ, kernel("side", writes=[WHOLE]), WRITE], 1),
    "freed while another reads": ([WRITE, wait("side", "main"), READ, freed], 1),
    "freed, and recorded": ([WRITE, wait("side", "main"), READ, recorded("side"), freed], 0),
    "recorded for one that waits for it": (
        [WRITE, wait("side", "main"), READ, wait("x", "side"), recorded("x"), freed],
        0,
    ),
    "recorded for another": ([WRITE, wait("side", "main"), READ, recorded("x"), freed], 1),
    "freed when its stream has waited": (
        [WRITE, wait("side", "main"), READ, wait("main", "side"), freed],
        0,
    ),
    "freed when the host has": ([WRITE, wait("side", "main"), READ, sync("side"), freed], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_sequences_in_order(case):
    steps, races = CASES[case]
    order = Order()
    order.allocated(1000, 100, "main")
    for step in steps:
        step(order)
    assert len(order.races) == races, order.races


def test_allocator_of_pinned_memory_waits_itself():
    order = Order()
    order.allocated(1000, 100, HOST)
    order.kernel("side", "copy", [WHOLE])
    order.freed(1000)
    assert order.races == []


def test_recorded_block_is_active_until_the_host_has_waited():
    order = Order()
    for step in (1, 2):
        order.allocated(1000, 100, "main")
        WRITE(order)
        wait("side", "main")(order)
        READ(order)
        recorded("side")(order)
        freed(order)
        assert (order.most_nbytes(), order.most_active_nbytes()) == (100, 100 * step)
    sync("side")(order)
    order.begin()
    assert order.most_active_nbytes() == 0
    order.allocated(1000, 100, "main")
    recorded("main")(order)
    freed(order)
    order.allocated(1000, 100, "main")
    assert order.most_active_nbytes() == 100


def test_bytes_and_counts():
    order = Order(lambda: "a line")
    order.allocated(1000, 100, "main")
    order.allocated(2000, 50, "main")
    order.allocated(3000, 7, HOST)
    order.freed(2000)
    order.kernel("main", "add")
    order.synchronize(None, "event")
    assert (order.nbytes(), order.most_nbytes()) == (100, 150)
    assert order.kernels == {"add": 1}
    assert order.synchronisations == {"event in a line": 1}
    order.begin()
    assert (order.most_nbytes(), order.kernels) == (100, {})
