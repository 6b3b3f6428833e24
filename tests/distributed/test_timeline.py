"""Timelines of real ranks: which events are recorded, and whether viewers can show their rows."""

import json
import socket
import time
from collections import defaultdict

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.timeline import Row, recorder
from tests.disk import on_a_disk
from tests.distributed.contexts import Problem

WIDTH = 96
STEPS = 3


def model():
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def train(world, folder, settings):
    """Run steps with a timeline, and one step before and after it."""
    torch.manual_seed(0)
    net = model()
    data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
    made = {"bucket_mb": 0.03, **settings}
    engine = sw.Engine(net, torch.optim.AdamW(net.parameters()), **made)
    path = folder / f"{socket.gethostname()}.json"
    loader = iter(sw.Loader(data, batch_size=8))

    def step():
        (x,) = next(loader)
        engine.backward(net(x).square().mean())
        engine.step()

    step()
    hooks = sum(len(m._forward_hooks) for m in net.modules())
    sw.start_timeline(path)
    for number in range(STEPS):
        step()
        if number in (0, STEPS - 1):  # the second waits for the first, which overlaps the steps
            engine.save(folder / "checkpoints", background=number == 0)
    sw.stop_timeline()
    assert recorder.active is None
    assert sum(len(m._forward_hooks) for m in net.modules()) == hooks
    step()
    loader.close()
    engine.close()
    return path


def events_of(path, rank):
    return [event for event in json.loads(path.read_text()) if event["pid"] == rank]


def check_nesting(events):
    """Check that slices on the same row are either nested or disjoint."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for row, slices in rows.items():
        open_until = []
        for begin, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while (
                open_until and open_until[-1] <= begin + 0.002
            ):  # times are written in 0.001 microseconds
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, (row, name, begin)
            open_until.append(end)
    return rows


def names(events, category):
    return [e["name"] for e in events if e.get("cat") == category and e["ph"] == "X"]


def attend(world, path):
    """Record the second step of a model whose sequences are split. In the first, it is tested."""
    problem = Problem()
    model = problem.model()
    engine = sw.Engine(model, problem.optimizer_of(model), quiet=True)
    for number in range(2):
        (batch,) = problem.batches(number)
        if number:
            sw.start_timeline(path)
        engine.backward(problem.loss_of(model, world.share(batch)))
        engine.step()
    sw.stop_timeline()
    engine.close()


@pytest.mark.parametrize(("method", "calls"), [("ulysses", 2), ("gathered", 3)])
def test_attention_exchanges_have_their_own_row(group, tmp_path, method, calls):
    path = tmp_path / "context.json"
    group(2, context=2, context_method=method)(attend, path)
    for rank in range(2):
        events = events_of(path, rank)
        check_nesting(events)
        # Two layers, forward and backward.
        assert names(events, "attention exchanges") == ["all-to-all"] * (2 * calls * 2)
        titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert titles[Row.ATTENTION] == "attention exchanges"
        assert not {"all-to-all"} & set(names(events, "communication"))


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_what_a_step_is_made_of(group, tmp_path, transport):
    (path, _) = group(2, transport=transport)(train, tmp_path, {})
    for rank in range(2):
        events = events_of(path, rank)
        check_nesting(events)
        assert names(events, "steps") == [f"step {number}" for number in range(2, 2 + STEPS)]
        compute = names(events, "compute")
        for name in ("forward", "forward 1", "backward", "reduce", "exchange", "update", "publish"):
            assert compute.count(name) == STEPS, name
        assert names(events, "data").count("next batch") == STEPS
        saved = names(events, "checkpoint") + names(events, "checkpoint, in the background")
        assert {"save", "copy", "write", "complete"} <= set(saved)
        sent = [e for e in events if e.get("cat") == "communication"]
        assert {e["name"].split()[0] for e in sent} == {"all-reduce"}
        parameters = sum(p.numel() for p in model().parameters())
        total = sum(e["args"]["bytes"] for e in sent)
        assert STEPS * 4 * parameters <= total <= STEPS * 4 * (parameters + 64 * len(sent))
        assert {e["args"]["dtype"] for e in sent} == {"float32"}
        check_flows(events)
        memory = [e["args"] for e in events if e["ph"] == "C"]
        assert memory
        assert all(values["resident set"] > 50 for values in memory)


def check_flows(events):
    """Check that each collective has an arrow from the moment at which the rank launched it."""
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ended = {e["id"]: (e["ts"], e["tid"]) for e in events if e["ph"] == "f"}
    assert begun.keys() == ended.keys()
    assert all(begun[one] == ended[one][0] for one in begun)
    sent = [(e["ts"], e["tid"]) for e in events if e.get("cat") == "communication"]
    assert sorted(sent) == sorted(ended.values())
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == Row.COMPUTE]
    for ts in begun.values():
        assert any(e["ts"] <= ts <= e["ts"] + e["dur"] for e in compute)


def test_sharded_parameters_on_a_disk(group, tmp_path):
    """Record gathers, reduce-scatters and transfers to and from the disk."""
    disk = f"nvme:{on_a_disk()}"
    settings = {"zero": 3, "offload_params": disk, "offload_optimizer": disk}
    (path, _) = group(2, transport="gloo")(train, tmp_path, settings)
    events = events_of(path, 1)
    check_nesting(events)
    kinds = {e["name"].split()[0] for e in events if e.get("cat") == "communication"}
    assert kinds == {"reduce-scatter", "all-gather"}
    assert "gather" in names(events, "compute")
    moved = [e for e in events if e.get("cat") == "tiers"]
    assert {e["name"].split()[0] for e in moved} == {"read", "write"}
    assert all(e["args"]["bytes"] % 4096 == 0 for e in moved)


def late_case(world, path):
    """Let rank 1 arrive late at a barrier."""
    sw.start_timeline(path)
    world.barrier()
    if world.rank == 1:
        time.sleep(0.2)
    world.barrier()
    sw.stop_timeline()
    world.barrier()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_wait_tells_for_whom(group, tmp_path, transport):
    path = tmp_path / "t.json"
    group(2, transport=transport)(late_case, path)
    (wait,) = (e for e in events_of(path, 0) if e.get("cat") == "wait" and e["dur"] > 1e5)
    assert wait["name"].startswith("wait: ")
    assert wait["args"] == {"for": "rank 1"}


def late_with_a_sum(world, path):
    """Let the last rank arrive late at a reduce-scatter with several messages from each rank."""
    buffer = torch.ones(2_500_000)
    cuts = [buffer.numel() * rank // world.size for rank in range(world.size + 1)]
    sw.start_timeline(path)
    world.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.5)
    world.collectives.reduce_scatter(buffer, cuts).wait()
    sw.stop_timeline()
    world.barrier()


def test_of_several_ranks_the_late_one_is_told(group, tmp_path):
    path = tmp_path / "t.json"
    group(3, transport="gloo")(late_with_a_sum, path)
    waits = [e for e in events_of(path, 0) if e.get("cat") == "wait" and e["dur"] > 2e5]
    assert [wait["args"] for wait in waits] == [{"for": "rank 2"}]


def distant_case(world, path):
    """Simulate that rank 1 is on another host, which has a different clock."""
    status_server = world.collectives.status_server
    places = dict(status_server._places)
    clock = time.monotonic_ns
    try:
        status_server._places = {
            rank: place.__class__(**(vars(place) | {"host": f"host {rank}"}))
            for rank, place in places.items()
        }
        if world.rank == 1:
            time.monotonic_ns = lambda: clock() + 10**12
        world.barrier()
        sw.start_timeline(path)
        world.barrier()
        with recorder.span("together"):
            world.barrier()
        sw.stop_timeline()
        world.barrier()
    finally:
        status_server._places = places
        time.monotonic_ns = clock


def test_ranks_on_two_hosts_have_a_file_each_and_one_time(group, tmp_path):
    path = tmp_path / "t.json"
    group(2)(distant_case, path)
    files = sorted(tmp_path.glob("*.json"))
    assert [file.name for file in files] == ["t.json", f"t.{socket.gethostname()}.json"]
    (far,) = (e for e in events_of(files[1], 1) if e["name"] == "together")
    (near,) = (e for e in events_of(path, 0) if e["name"] == "together")
    # The ranks left one barrier together and arrived at the next, so the time between overlaps.
    assert abs(far["ts"] - near["ts"]) < 50_000
    assert all(event["pid"] == 1 for event in json.loads(files[1].read_text()))
