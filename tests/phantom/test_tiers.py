"""Offloaded states, activations and checkpoints: waits for copies, pinned memory, streams."""

import pytest
import torch

from shardwise.tiers.copy_stream import BLOCKS, CopyStream
from shardwise.tiers.direct_io import THREADS
from shardwise.tiers.host_window import HostWindow
from tests.disk import on_a_disk
from tests.phantom import cases
from tests.phantom.order import ASIDE

A_ROW = 4096
"""An upper limit of the pinned bytes for a step's figures."""


def of_training(waits):
    """Return the synchronisations of the training thread."""
    return {cause: n for cause, n in waits.items() if not cause.startswith(ASIDE)}


ON_DISK = [
    # The sums are on the device and the update runs on the CPU: each bucket's sum is copied down.
    ({"zero": 1}, {"optimizer": "nvme"}, {"states/storage/host_storage.py"}),
    # The sums are on the disk, and a thread has written them there.
    ({"zero": 2}, {"optimizer": "nvme"}, set()),
    ({"zero": 2}, {"optimizer": "device", "gradients": "nvme"}, set()),
    ({"zero": 3, "precision": "bf16"}, {"optimizer": "nvme", "params": "nvme"}, set()),
]
OFTEN = {1}


@pytest.mark.parametrize(
    ("settings", "named", "places"),
    [
        pytest.param(*case, marks=() if n in OFTEN else pytest.mark.full, id=str(case[:2]))
        for n, case in enumerate(ON_DISK)
    ],
)
def test_states_on_a_disk_make_training_wait_for_reads_only(phantom, settings, named, places):
    """Except for the one row of each step, and sums that an update on the CPU needs."""
    for waits, _, buckets in phantom(2, cases.one_step, settings | tiers(named)):
        found = of_training(waits)
        others = {k: n for k, n in found.items() if not any(place in k for place in places)}
        assert sum(others.values()) == 1, others
        assert all("engine/exchange.py" in cause for cause in others), others
        assert sum(found.values()) - 1 <= buckets, found


def tiers(named):
    return {f"offload_{k}": f"nvme:{on_a_disk()}" if v == "nvme" else v for k, v in named.items()}


def test_activations_on_a_disk_block_no_stream_and_use_few_blocks(phantom):
    settings = {"offload_activations": f"nvme:{on_a_disk()}"}
    [report] = phantom.reports(1, cases.small_blocks, cases.activations, settings)
    assert report.races == []
    assert report.pinned <= THREADS * BLOCKS * cases.SMALL + A_ROW
    assert report.kernels["copy up"] > 4 * THREADS * BLOCKS
    spool = [k for k in of_training(report.synchronisations) if "spool" in k or "offload" in k]
    assert spool == []


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("row", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_checkpoint_passes_through_two_blocks(phantom, tmp_path, row, background):
    """Tensors are copied only through them; messages between ranks and plain numbers are not."""
    args = cases.saved_and_loaded, tmp_path, {"zero": row}, background
    for found in phantom(2, cases.small_blocks, *args):
        for waits, pinned in found:
            assert pinned <= 2 * BLOCKS * cases.SMALL + A_ROW
            stopped = [cause for cause in waits if "blocking in engine/" in cause]
            assert not stopped, waits
            assert sum(n for cause, n in waits.items() if "tiers/pieces.py" in cause) > BLOCKS
        (saved, _), _ = found  # all step counts are copied together
        assert sum(n for cause, n in saved.items() if "tiers/copy_stream.py" in cause) == 1, saved


def ways(world):
    """Return whether a copy up waits for an earlier copy down, and the values that it read."""
    from tests.phantom.streams import Device, name_of

    copies = CopyStream(world.device)
    data = torch.ones(1000, device=world.device)
    down, other = copies.memory(1000, data.dtype), copies.memory(1000, data.dtype).fill_(2)
    left = copies.down(data, down)
    up, here = (name_of(stream.cuda_stream) for stream in (copies._up, copies._down))
    _, came = copies.up(other)
    apart = Device.order.moment(here)[here] > came.seen.get(here, 0)
    back, came = copies.up(down, [left])
    behind = came.seen[here] >= left.seen[here]
    copies.await_(came)
    return up != here, apart, behind, bool((back == 1).all())


def test_each_direction_has_its_own_stream(phantom):
    assert phantom(1, ways) == [(True, True, True, True)]


@pytest.mark.parametrize("rests", ["host", "disk"])
def test_saved_activation_may_be_used_on_another_stream(phantom, rests):
    phantom(1, cases.fetched_elsewhere, on_a_disk() if rests == "disk" else None)


def interrupted(world, verb):
    """Raise in the reader of a checkpoint's piece, and free the memory."""
    window = HostWindow()
    flat = torch.ones(8 * cases.SMALL, dtype=torch.uint8, device=world.device)
    pieces = window.read(flat) if verb == "read" else window.write(flat, fresh=True)
    for _ in range(3):
        next(pieces)
    pieces.close()
    del flat


@pytest.mark.parametrize("verb", ["read", "write"])
def test_window_left_early_is_in_order(phantom, verb):
    phantom(1, cases.small_blocks, interrupted, verb)


def windows(world):
    """Return the number of streams that some checkpoints use."""
    flat = torch.ones(10, device=world.device)
    first = torch.cuda.Stream(world.device).cuda_stream
    for _ in range(3):
        list(HostWindow().read(flat))
    return torch.cuda.Stream(world.device).cuda_stream - first - 1


def test_checkpoints_share_their_streams(phantom):
    assert phantom(1, windows)[0] <= 2
