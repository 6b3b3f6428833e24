"""Copies between host and device overlap with kernels, according to the profiler."""

import json

import pytest
import torch

import shardwise as sw
from tests.gpu.training import batch, build, loss_of, needs_gpu, tiers

pytestmark = needs_gpu


def traced(world, folder, named):
    """Spans (stream, first, end) in microseconds of kernels, of copies down and of copies up."""
    model, optimizer = build(world, width=1024, blocks=8)
    engine = sw.Engine(model, optimizer, zero=3, bucket_mb=8.0, **tiers(**named))

    def backward():
        engine.backward(loss_of(model, *batch(world, 0, width=1024, rows=8192)))
        torch.cuda.synchronize()

    for _ in range(2):
        backward()
        engine.step()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        backward()
    engine.step()
    engine.close()
    path = f"{folder}/trace.json"
    profile.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    found = {"kernel": [], "DtoH": [], "HtoD": []}
    for event in events:
        kind = event.get("cat")
        if kind == "gpu_memcpy":
            kind = next((way for way in ("DtoH", "HtoD") if way in event["name"]), None)
        if kind in found:
            first = event["ts"]
            found[kind].append((event["args"]["stream"], first, first + event["dur"]))
    return found


def beside(copies, kernels):
    """Return the fraction of the copies' time during which a kernel ran on another stream."""
    total = shared = 0.0
    for stream, first, end in copies:
        total += end - first
        others = [(max(a, first), min(b, end)) for s, a, b in kernels if s != stream]
        shared += sum(b - a for a, b in others if a < b)
    return shared / total


@pytest.mark.parametrize(
    ("named", "way"),
    [({"optimizer": "cpu"}, "DtoH"), ({"optimizer": "device", "params": "cpu"}, "HtoD")],
    ids=["gradients come down", "parameters go up"],
)
def test_copies_run_beside_kernels(group, tmp_path, named, way):
    (found,) = group(1, device="cuda")(traced, str(tmp_path), named, limit=120)
    large = [span for span in found[way] if span[2] - span[1] > 20]
    assert large, "nothing was copied"
    assert beside(large, found["kernel"]) > 0.3
