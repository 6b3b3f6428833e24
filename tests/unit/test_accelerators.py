"""Code for any accelerator does not use CUDA."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shardwise
from shardwise.horovod import streams
from shardwise.world.generator_states import GeneratorStates
from shardwise.world.randomness import generator_of

SOURCES = Path(shardwise.__file__).parent
CUDA_ALONE = {
    "comm/abortable_nccl.py": "NCCL is for GPUs of CUDA and ROCm",
    "comm/connect.py": "the same",
    "comm/nccl.py": "the same",
    "config/settings.py": "ranks are put on these devices: the transports are NCCL and Gloo",
    "deepspeed/accelerator.py": "DeepSpeed's own accelerator: that of NCCL or of Gloo",
    "tools/doctor/checks.py": "names the GPUs that NCCL has",
    "horovod/basics.py": "the version of NCCL",
    "horovod/script_checks.py": "quotes a line of Horovod's guide",
    "world/initialize.py": "gives each rank a device that NCCL can use",
    "launch/function.py": "a fork after CUDA was used is refused",
    "lightning/adoption.py": "Lightning's name for the device that ranks are put on",
    "lightning/training.py": "the same, the other way round",
    "model/meta/deferred_init.py": "torch's attribute, for what users ask",
    "messages/other_libraries.py": "quotes a setting of ours",
    "parallel/tensor/torch_functions.py": "a list of torch's attributes",
    "tools/plan/calibration_worker.py": "the memory of a GPU that ranks are put on",
    "tools/verify/stock/batches.py": "moves a batch from a rank's GPU to that of the process",
    "tools/verify/stock/draws.py": "the name of a generator",
    "tools/verify/stock/readers.py": "reads the generator that stock scripts draw from",
    "states/optimizer/optimizer_kind.py": "fused kernels whose arithmetic is known to be the same",
    "tiers/copy_stream.py": "events that a thread can wait for without spinning are CUDA's",
}
"""Files that may ask for it, and why."""


def test_cuda_is_asked_for_where_it_is_meant():
    asking = re.compile(r"is_cuda|torch\.cuda\b|[\"']cuda[\"']")
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if asking.search(path.read_text())
    }
    assert found == set(CUDA_ALONE)


class Streams:
    """A stand-in for an accelerator's module, such as torch.xpu, that records calls."""

    def __init__(self):
        self.said = []
        self.default_generators = [torch.Generator(), torch.Generator()]

    def init(self):
        self.said.append("init")

    def current_device(self):
        return 1

    def current_stream(self, device):
        return SimpleNamespace(wait_event=lambda event: self.said.append(("waits", event)))

    def Event(self):  # noqa: N802 (torch's name)
        return SimpleNamespace(record=lambda stream: self.said.append("records"))

    def Stream(self, device):  # noqa: N802
        return "a stream"

    def stream(self, stream):
        self.said.append(("enters", stream))
        return nullcontext()


@pytest.fixture
def xpu(monkeypatch):
    """The module that torch has for the device xpu."""
    module, known = Streams(), torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda device: module if torch.device(device).type == "xpu" else known(device),
    )
    return module


def test_generators(xpu):
    device = torch.device("xpu")
    assert generator_of(device) is xpu.default_generators[1]
    assert generator_of(torch.device("xpu", 0)) is xpu.default_generators[0]
    assert generator_of(torch.device("cpu")) is torch.default_generator
    states = GeneratorStates.now(device)
    drawn = torch.randn(3, generator=xpu.default_generators[1])
    states.restore(device)
    assert torch.equal(torch.randn(3, generator=xpu.default_generators[1]), drawn)


def test_the_drop_in_orders_streams(xpu):
    device, recorded = torch.device("xpu", 0), []
    tensor = SimpleNamespace(device=device, record_stream=recorded.append)
    event = streams.StreamEvent.record([torch.zeros(1), tensor])
    assert xpu.said == ["records"]
    there = streams.CommunicationStream(device)
    with there.after(event):
        there.record_use([tensor, torch.zeros(1)])
    assert xpu.said[1:] == [("enters", "a stream"), ("waits", event._event)]
    assert recorded == ["a stream"]


def test_on_the_cpu_there_is_nothing_to_order():
    event = streams.StreamEvent.record([torch.zeros(1)])
    event.wait()
    with streams.CommunicationStream(torch.device("cpu")).after(event):
        streams.record_use([torch.zeros(1)])
