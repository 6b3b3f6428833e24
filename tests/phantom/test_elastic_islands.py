"""Exchanges of elastic islands copy data from the device, and back to it."""

import selectors
import sys
from contextlib import closing
from threading import Event, Thread

import pytest
import torch

from shardwise.comm import Solo
from shardwise.islands.elastic.broker import HostBroker
from shardwise.islands.elastic.collectives import ElasticRun
from shardwise.islands.elastic.exchanges import Exchanges
from shardwise.islands.elastic.link import IslandLink
from shardwise.islands.elastic.membership import IslandPlace, Membership

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="--elastic-islands needs Linux")


def carry(selector, over):
    """Run exchanges until they are `over`."""
    while not over.is_set():
        for key, _ in selector.select(0.02):
            key.data()


def run_of(broker, island, group):
    """Return the group of all ranks, as seen by the one of `island`."""
    place = IslandPlace(
        island=island, count=2, size=1, fd=broker.open(island).detach(), returns=False
    )
    return ElasticRun(group, IslandLink(place, island, timeout=20.0, warn_after=20.0))


def exchange(run, device, island, found):
    """Return an island's results of a sum, a broadcast, rows, and the bytes of a boundary."""
    value = torch.full((3,), 1.5 + island, dtype=torch.bfloat16, device=device)
    summed, given = value.clone(), value.clone()
    run.all_reduce(summed).wait()
    run.broadcast(given.view(torch.uint8)).wait()
    rows = run.gather_rows(torch.full((2,), float(island), device=device))
    peers = run.split([[0, 1]])
    at_once = peers.gather_at_once(4, torch.full((5,), island, dtype=torch.uint8, device=device))
    found += [(each.device.type, each.cpu().tolist()) for each in (summed, given, rows)]
    found.append([each.tolist() for each in at_once])


def both(world):
    """Return the results of an island on the device and of another island on the CPU."""
    selector, over = selectors.DefaultSelector(), Event()
    exchanges = Exchanges(Membership(count=2, size=1), lambda islands: None)
    broker = HostBroker(selector, exchanges)
    exchanges.attach(broker, range(2))
    exchanges.link(range(2))
    found = [], []
    runs = [run_of(broker, 0, world.collectives), run_of(broker, 1, Solo())]
    with closing(selector), closing(broker):
        threads = [
            Thread(target=carry, args=(selector, over)),
            Thread(target=exchange, args=(runs[1], torch.device("cpu"), 1, found[1])),
        ]
        for thread in threads:
            thread.start()
        exchange(runs[0], world.device, 0, found[0])
        threads[1].join()
        over.set()
        threads[0].join()
    for run in runs:
        run.link.close()
    return found


def test_between_the_device_and_the_cpu(phantom):
    (found,) = phantom(1, both)
    values = [[4.0] * 3, [1.5] * 3, [[0.0, 0.0], [1.0, 1.0]]]
    bytes_of_both = [[0] * 5, [1] * 5]
    for device, here in zip(("cuda", "cpu"), found, strict=True):
        assert here == [*((device, value) for value in values), bytes_of_both]
