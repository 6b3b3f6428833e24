"""The timeline of a Horovod script."""

import json

import pytest
import torch

import shardwise.horovod as hvd
from shardwise.timeline import Row
from tests.distributed.horovod import initialized


def recorded_case(world, path):
    with initialized():
        hvd.start_timeline(path)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        hvd.allreduce(torch.ones(3), name="accuracy")
        hvd.allreduce(torch.ones(1 << 22), name="large enough to be slept for")
        hvd.stop_timeline()
        with pytest.warns(UserWarning, match="mark_cycles has no effect"):
            hvd.start_timeline(path, mark_cycles=True)
        hvd.stop_timeline()
        world.barrier()


@pytest.mark.parametrize("size", [2])
def test_steps_and_named_operations(group, tmp_path, size):
    path = tmp_path / "timeline.json"
    group(size)(recorded_case, str(path))
    events = json.loads(path.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    for rank in range(size):
        of_rank = [event for event in events if event.get("pid") == rank and event["ph"] == "X"]
        names = [event["name"] for event in of_rank]
        assert [name for name in names if name.startswith("step ")] == [
            "step 1",
            "step 2",
            "step 3",
        ]
        assert names.count("update") == names.count("synchronize") == 3
        # The communicating thread sleeps, and the computing thread's waits appear as its own spans.
        assert {e["tid"] for e in of_rank if e["cat"] == "wait beside"} <= {Row.BESIDE}
        assert "wait" not in {e["cat"] for e in of_rank}
        metric = next(event for event in of_rank if event["name"] == "allreduce accuracy")
        assert (metric["args"]["bytes"], metric["args"]["dtype"]) == (12, "float32")
