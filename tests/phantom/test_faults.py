"""Planted faults: each wait and each notice of the package, left out in turn, must show.

By files that are asking for it, the innermost first.
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
    "a sum that nobody waits for": (cases.summed_in_vain, 1 << 17),
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
    """A fault that `make test` plants: one of each kind and more."""
    return pytest.param(kind, places, case, id=_name(kind, places, case))


def rarely(kind, places, case):
    """One that `make test-all` plants."""
    return pytest.param(kind, places, case, marks=pytest.mark.full, id=_name(kind, places, case))


def _name(kind, places, case):
    return f"{kind} in {places[-1]}, {case}"


LEFT_OUT = [
    rarely(COLLECTIVE, ("engine/consistency.py",), "zero 0"),
    often(COLLECTIVE, ("engine/engine_spec.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/initial_values.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/gradient_weighting.py",), "zero 0"),
    rarely(COLLECTIVE, ("engine/exchange.py",), "zero 0"),
    rarely(COLLECTIVE, ("states/gradients/bucket_reducer.py",), "zero 0"),
    rarely(COLLECTIVE, ("states/gradients/bucket_reducer.py",), "zero 3"),
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
    rarely(RECORD, ("comm/nccl.py",), "a sum that nobody waits for"),
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
    often(COLLECTIVE, ("horovod/basics.py",), "horovod"),
    rarely(
        EVENT,
        (BESIDE, "states/parameters/bucket_gathers.py", "states/parameters/unshard.py"),
        "states on the host",
    ),
    rarely(EVENT, (BESIDE, "states/storage/host_storage.py"), "gradients on the host"),
    rarely(EVENT, (BESIDE, "states/gradients/bucket_reducer.py"), "gradients on the host"),
    rarely(EVENT, (BESIDE, "states/parameters/bucket_gathers.py"), "states on a disk"),
    rarely(EVENT, (SIDE, "horovod/operation_handle.py"), "horovod"),
    rarely(EVENT, (SIDE, HVD), "horovod"),
    rarely(RECORD, (SIDE, "horovod/operation_handle.py"), "horovod"),
    often(RECORD, (SIDE, HVD), "horovod"),
    often(
        SYNCHRONIZE,
        ("states/storage/host_storage.py", "states/optimizer/offload_read_ahead.py"),
        "states on the host",
    ),
    often(SYNCHRONIZE, ("tiers/nvme.py", "phantom/cases.py"), "a buffer lent again"),
    often(SYNCHRONIZE, ("tiers/staging.py", "tiers/nvme.py"), "gradients on a disk"),
    rarely(EVENT, (BESIDE, "states/storage/storage.py"), "gradients on a disk"),
    often(SYNCHRONIZE, ("tiers/pieces.py", "tiers/device_spool.py"), "activations on a disk"),
    rarely(EVENT, (BESIDE, "tiers/pieces.py", "tiers/device_spool.py"), "activations on a disk"),
    rarely(
        EVENT,
        (BESIDE, "tiers/device_spool.py", "model/offloaded_tensor.py"),
        "activations on a disk",
    ),
    often(SYNCHRONIZE, ("tiers/pieces.py", "tiers/host_window.py"), "saved"),
    rarely(EVENT, (BESIDE, "tiers/pieces.py", "tiers/host_window.py"), "saved"),
    rarely(EVENT, (BESIDE, "tiers/host_window.py", "engine/load_tensors.py"), "saved"),
    rarely(EVENT, (BESIDE, "model/offloaded_tensor.py"), "activations on the host"),
    rarely(RECORD, (BESIDE, "model/offloaded_tensor.py"), "activations on the host"),
    rarely(RECORD, (BESIDE, "model/offloaded_tensor.py"), "fetched for another stream"),
    rarely(RECORD, (BESIDE, "tiers/device_spool.py"), "read for another stream"),
]


UNSEEN = [
    # Parameters in the host's memory are written by the host alone: two copies that read them
    # need no order, and the host has waited for both before it writes.
    (EVENT, (BESIDE, "states/parameters/sharded_bucket.py"), "states on the host"),
    # What comes down is a part of a bucket that lives as long as the engine.
    (RECORD, (BESIDE, "states/storage/host_storage.py"), "gradients on the host"),
    # Nothing is on its way any more when state is given back: the update has waited for it.
    (
        SYNCHRONIZE,
        ("states/storage/host_storage.py", "states/optimizer/interval_gather.py"),
        "states on the host",
    ),
]
"""Left out, they are not found, for the reason that stands above each."""


def left_out(world, kind, places, function, *args):
    with Planted.of(kind, *places):
        function(world, *args)


def named(case):
    """A case as arguments; what rests on a disk does so in this run's own folder."""
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
def test_left_out(phantom, kind, places, case):
    assert found(phantom, kind, places, case)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "places", "case"), UNSEEN, ids=lambda p: str(p)[:40])
def test_unseen(phantom, kind, places, case):
    assert not found(phantom, kind, places, case)


def rounded_early(world, folder):
    """A sum over the ranks is rounded before it is there."""
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
    """Through the host, and its memory is sent while the copy is on its way."""
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
    """Inside the block, `owner` has another function."""
    real = getattr(owner, name)
    setattr(owner, name, functools.partialmethod(function, real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def unsettled(ring, real):
    """The next block of a ring, whatever still reads it."""
    del real
    block = ring._blocks[0]
    ring._blocks.rotate(-1)
    return block


def written_while_it_goes_up(world, folder):
    """A pinned block is filled anew from a disk before its copy to the device has ended."""
    with replaced(StagingRing, "next", unsettled):
        cases.small_blocks(world, cases.activations, {"offload_activations": f"nvme:{folder}"})


def up_before_it_came_down(world, folder):
    """The stream up does not wait for that down, whose sum it takes up again."""
    del folder
    with replaced(CopyStream, "up", lambda copies, real, memory, after=(): real(copies, memory)):
        cases.added_twice(world)


def narrowed_early(world, folder):
    """Parameters that go up in 16 bits share one pinned block, and nobody waits for it."""
    del folder
    with replaced(StagingRing, "next", unsettled):
        named = {"optimizer": "cpu"}
        cases.by_precision(world, {"zero": 2, "precision": "bf16"}, named)


def forgotten(world, folder):
    """What was brought back is freed unused, while it is on its way, without a notice."""
    with replaced(CopyStream, "hold", lambda *_: None):
        spool = DeviceSpool(Spool(folder, "activations", rank=0), CopyStream(world.device))
        record = spool.write(torch.ones(100, device=world.device).view(torch.uint8))
        record.wait()
        coming = spool.read(record)
        record.wait()
        del coming


def hurried(world, folder):
    """A user's stream does not wait for the one on which the model was made."""
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
def test_out_of_order(phantom, function, transport):
    settings = {} if transport == "auto" else {"transport": transport}
    reports = phantom.reports(2, function, on_a_disk(), **settings)
    assert any(report.races for report in reports)
