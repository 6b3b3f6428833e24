"""Planted faults: leaving out any wait or notice of the package must be detected.

A fault is identified by the files that ask for the action, the innermost first.
"""

import functools
from contextlib import contextmanager

import pytest
import torch

from shardwise.comm import host_staged, nccl
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import DeviceSpool
from shardwise.tiers.spool import Spool
from shardwise.tiers.staging import StagingRing
from tests.disk import on_a_disk
from tests.phantom import cases
from tests.phantom.planting import COLLECTIVE, EVENT, RECORD, SYNCHRONIZE, Planted

BESIDE, SIDE, HVD = "tiers/copy_stream.py", "horovod/streams.py", "horovod/background.py"

CASES = {
    "zero 0": (cases.stepped, {"zero": 0}),
    "zero 2, averaged": (cases.stepped, {"zero": 2, "ema_decay": 0.9}),
    "zero 3": (cases.stepped, {"zero": 3}),
    "states on the host": (
        cases.by_precision,
        {"zero": 3, "precision": "bf16"},
        {"optimizer": "cpu", "params": "cpu"},
    ),
    "gradients on the host": (
        cases.by_precision,
        {"zero": 2, "precision": "bf16"},
        {"optimizer": "device", "gradients": "cpu"},
    ),
    "states on a disk": (
        cases.by_precision,
        {"zero": 3, "precision": "bf16"},
        {"optimizer": "nvme", "params": "nvme"},
    ),
    "BatchNorm": (cases.stepped, {"zero": 1}, "ConvNet"),
    "SyncBatchNorm": (cases.stepped, {"zero": 1, "sync_batch_norm": True}, "ConvNet"),
    "exact": (cases.exact, {"zero": 2}, "ConvNet"),
    "loaded": (cases.loaded, {"zero": 0}),
    "tensor": (cases.split, {"zero": 2}, {"tensor": 2}),
    "pipeline": (cases.split, {"microbatches": 4}, {"pipeline": 2}),
    "horovod": (cases.horovod,),
    "activations on the host": (cases.activations, {"offload_activations": "cpu"}),
    "activations on a disk": (
        cases.small_blocks,
        cases.activations,
        {"offload_activations": "nvme:"},
    ),
    "gradients on a disk": (
        cases.accumulated,
        {"zero": 2},
        {"optimizer": "device", "gradients": "nvme"},
    ),
    "gradients added up on the host": (
        cases.accumulated,
        {"zero": 2},
        {"optimizer": "device", "gradients": "cpu"},
    ),
    "a sum waited for elsewhere": (cases.summed_elsewhere, 1 << 17),
    "a short sum waited for elsewhere": (cases.summed_elsewhere, 64),
    "a sum without a wait": (cases.summed_in_vain, 1 << 17),
    "a buffer lent again": (cases.lent_again, "folder"),
    "fetched for another stream": (cases.fetched_elsewhere, None),
    "read for another stream": (cases.fetched_elsewhere, "folder"),
    "saved": (cases.small_blocks, cases.saved_and_loaded, "folder", {"zero": 3}, False),
}
ALONE = (
    "activations on the host",
    "activations on a disk",
    "a buffer lent again",
    "fetched for another stream",
    "read for another stream",
)


def often(kind, places, case):
    """Return a fault that `make test` plants. There is at least one of each kind."""
    return pytest.param(kind, places, case, id=_name(kind, places, case))


def rarely(kind, places, case):
    """Return a fault that `make test-all` plants."""
    return pytest.param(kind, places, case, marks=pytest.mark.full, id=_name(kind, places, case))


def _name(kind, places, case):
    return f"{kind} in {places[-1]}, {case}"


LEFT_OUT = [
    rarely(COLLECTIVE, ("engine/consistency.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/engine_spec.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/initial_values.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/gradient_weighting.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/exchange.py",), "zero 0"),
    rarely(COLLECTIVE, ("states/gradients/bucket.py",), "zero 0"),
    rarely(COLLECTIVE, ("states/gradients/bucket.py",), "zero 3"),
    often(COLLECTIVE, ("engine/step.py",), "zero 2, averaged"),
    rarely(COLLECTIVE, ("states/optimizer/ema.py",), "zero 2, averaged"),
    rarely(COLLECTIVE, ("states/optimizer/interval_gather.py",), "zero 2, averaged"),
    often(
        COLLECTIVE,
        ("states/parameters/bucket_gathers.py", "states/parameters/unshard.py"),
        "zero 3",
    ),
    rarely(COLLECTIVE, ("states/parameters/sharded_parameters.py",), "zero 3"),
    rarely(COLLECTIVE, ("model/buffers.py",), "BatchNorm"),
    rarely(COLLECTIVE, ("model/batch_norm_statistics.py",), "SyncBatchNorm"),
    rarely(COLLECTIVE, ("model/sync_batch_norm.py",), "SyncBatchNorm"),
    rarely(COLLECTIVE, ("comm/nccl.py",), "exact"),
    often(RECORD, ("comm/nccl.py",), "a sum waited for elsewhere"),
    rarely(RECORD, ("comm/nccl.py",), "a short sum waited for elsewhere"),
    rarely(RECORD, ("comm/nccl.py",), "a sum without a wait"),
    rarely(COLLECTIVE, ("parallel/tensor/region_collectives.py",), "tensor"),
    rarely(COLLECTIVE, ("parallel/tensor/split_model.py",), "tensor"),
    rarely(
        COLLECTIVE,
        ("parallel/pipeline/channels.py", "parallel/pipeline/pipeline_group.py"),
        "pipeline",
    ),
    rarely(COLLECTIVE, ("comm/base.py", "parallel/pipeline/channels.py"), "pipeline"),
    rarely(COLLECTIVE, ("parallel/pipeline/parameter_ownership.py",), "pipeline"),
    rarely(COLLECTIVE, ("data/batch_schedule.py",), "loaded"),
    rarely(COLLECTIVE, ("horovod/execution.py",), "horovod"),
    rarely(COLLECTIVE, ("horovod/basics.py",), "horovod"),
    rarely(
        EVENT,
        (BESIDE, "states/parameters/bucket_gathers.py", "states/parameters/unshard.py"),
        "states on the host",
    ),
    rarely(EVENT, (BESIDE, "states/storage/host_storage.py"), "gradients on the host"),
    rarely(EVENT, (BESIDE, "states/gradients/reduction_queue.py"), "gradients on the host"),
    rarely(EVENT, (BESIDE, "states/parameters/bucket_gathers.py"), "states on a disk"),
    rarely(EVENT, (SIDE, "horovod/operations.py"), "horovod"),
    rarely(EVENT, (SIDE, HVD), "horovod"),
    rarely(RECORD, (SIDE, "horovod/operations.py"), "horovod"),
    often(RECORD, (SIDE, HVD), "horovod"),
    often(
        SYNCHRONIZE,
        ("states/storage/host_storage.py", "states/optimizer/offloaded_update.py"),
        "states on the host",
    ),
    rarely(SYNCHRONIZE, ("tiers/nvme.py", "phantom/cases.py"), "a buffer lent again"),
    often(SYNCHRONIZE, ("tiers/staging.py", "tiers/nvme.py"), "gradients on a disk"),
    rarely(EVENT, (BESIDE, "states/storage/storage.py"), "gradients on a disk"),
    often(SYNCHRONIZE, ("tiers/pieces.py", "tiers/device_spool.py"), "activations on a disk"),
    rarely(EVENT, (BESIDE, "tiers/pieces.py", "tiers/device_spool.py"), "activations on a disk"),
    rarely(
        EVENT,
        (BESIDE, "tiers/device_spool.py", "model/offloaded_tensor.py"),
        "activations on a disk",
    ),
    rarely(SYNCHRONIZE, ("tiers/pieces.py", "tiers/host_window.py"), "saved"),
    rarely(EVENT, (BESIDE, "tiers/pieces.py", "tiers/host_window.py"), "saved"),
    rarely(EVENT, (BESIDE, "tiers/host_window.py", "checkpoint/load_tensors.py"), "saved"),
    rarely(EVENT, (BESIDE, "model/offloaded_tensor.py"), "activations on the host"),
    rarely(RECORD, (BESIDE, "model/offloaded_tensor.py"), "activations on the host"),
    rarely(RECORD, (BESIDE, "model/offloaded_tensor.py"), "fetched for another stream"),
    rarely(RECORD, (BESIDE, "tiers/device_spool.py"), "read for another stream"),
]


UNSEEN = [
    # Only the host writes parameters in host memory. Two copies that read them need no order, and
    # the host waits for both before it writes.
    (EVENT, (BESIDE, "states/parameters/sharded_bucket.py"), "states on the host"),
    # The copied gradient is a part of a bucket that lives as long as the engine.
    (RECORD, (BESIDE, "states/storage/host_storage.py"), "gradients on the host"),
    # No copy is pending when state is returned to the user: the update has waited for all.
    (
        SYNCHRONIZE,
        ("states/storage/host_storage.py", "states/optimizer/interval_gather.py"),
        "states on the host",
    ),
]
"""Actions whose absence is not detected, for the reason in the comment above each."""


def left_out(world, kind, places, function, *args):
    with Planted.of(kind, *places):
        function(world, *args)


def named(case):
    """Return a case as arguments; state on a disk is stored in this run's own folder."""
    function, *args = CASES[case]
    return function, *(
        {k: f"nvme:{on_a_disk()}" if v == "nvme:" else v for k, v in arg.items()}
        if isinstance(arg, dict)
        else on_a_disk()
        if arg == "folder"
        else arg
        for arg in args
    )


def found(phantom, kind, places, case):
    size = 1 if case in ALONE else 2
    reports = phantom.reports(size, left_out, kind, places, *named(case))
    return [race for report in reports for race in report.races]


@pytest.mark.parametrize(("kind", "places", "case"), LEFT_OUT)
def test_missing_wait_is_detected(phantom, kind, places, case):
    assert found(phantom, kind, places, case)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "places", "case"), UNSEEN, ids=lambda p: str(p)[:40])
def test_harmless_missing_wait_is_not_reported(phantom, kind, places, case):
    assert not found(phantom, kind, places, case)


def rounded_early(world, folder):
    """Round a sum across ranks before it is complete."""
    real = nccl.Nccl._handle

    def handle(self, work, after=None):
        if after is not None:
            after()
        return real(self, work)

    nccl.Nccl._handle = handle
    try:
        cases.by_precision(world, {"zero": 0, "precision": "bf16"}, {})
    finally:
        nccl.Nccl._handle = real


def sent_before_it_came_down(world, folder):
    """Send host memory while the copy into it is still running."""
    real = host_staged.HostStaged._down
    host_staged.HostStaged._down = lambda self, data: self._blank(data).copy_(
        data, non_blocking=True
    )
    try:
        cases.stepped(world, {"zero": 0})
    finally:
        host_staged.HostStaged._down = real


@contextmanager
def replaced(owner, name, function):
    """Context manager that replaces a function of `owner`."""
    real = getattr(owner, name)
    setattr(owner, name, functools.partialmethod(function, real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def unsettled(ring, real):
    """Return the next block of a ring without waiting for its readers."""
    del real
    block = ring._blocks[0]
    ring._blocks.rotate(-1)
    return block


def written_while_it_goes_up(world, folder):
    """Refill a pinned block from a disk before its copy to the device has completed."""
    with replaced(StagingRing, "next", unsettled):
        cases.small_blocks(world, cases.activations, {"offload_activations": f"nvme:{folder}"})


def up_before_it_came_down(world, folder):
    """Start a copy to the device without waiting for the copy to the host that it reads."""
    del folder
    with replaced(CopyStream, "up", lambda copies, real, memory, after=(): real(copies, memory)):
        cases.added_twice(world)


def narrowed_early(world, folder):
    """Send 16-bit parameters through one pinned block without waiting for it."""
    del folder
    with replaced(StagingRing, "next", unsettled):
        named = {"optimizer": "cpu"}
        cases.by_precision(world, {"zero": 2, "precision": "bf16"}, named)


def forgotten(world, folder):
    """Free loaded activations during their copy, without notice to the allocator."""
    with replaced(CopyStream, "hold", lambda *_: None):
        spool = DeviceSpool(Spool(folder, "activations", rank=0), CopyStream(world.device))
        record = spool.write(torch.ones(100, device=world.device).view(torch.uint8))
        record.wait()
        coming = spool.read(record)
        record.wait()
        del coming


def hurried(world, folder):
    """Use a model on a stream without waiting for the stream that made it."""
    model, optimizer = cases.made(world)
    x, y = cases.batch(world, 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        cases.loss_of(model, x, y).backward()
    optimizer.step()


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "transport"),
    [
        (rounded_early, "auto"),
        (sent_before_it_came_down, "gloo"),
        (hurried, "auto"),
        (written_while_it_goes_up, "auto"),
        (up_before_it_came_down, "auto"),
        (narrowed_early, "auto"),
        (forgotten, "auto"),
    ],
)
def test_wrong_order_is_detected(phantom, function, transport):
    settings = {} if transport == "auto" else {"transport": transport}
    reports = phantom.reports(2, function, on_a_disk(), **settings)
    assert any(report.races for report in reports)
