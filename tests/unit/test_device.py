"""Which device a rank computes on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import LaunchError
from shardwise.net.identity import Identity
from shardwise.world.initialize import _device, _share_cores


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)` lets torch show n of them; the device that was set is then in `gpus.set`."""

    def show(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(show, "set", device))

    return show


def _rank(number, size):
    return Identity(launcher="torchrun", rank=number, size=size, local_rank=number, local_size=size)


@pytest.mark.parametrize(
    ("count", "wanted", "sharing", "devices"),
    [
        (0, "auto", False, ["cpu", "cpu"]),
        (0, "auto", True, ["cpu", "cpu"]),
        (2, "cpu", False, ["cpu", "cpu"]),
        (2, "auto", False, ["cuda:0", "cuda:1"]),
        (4, "cuda", False, ["cuda:0", "cuda:1"]),
        (1, "cuda", True, ["cuda:0", "cuda:0"]),
        (2, "cuda", True, ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_ranks_have_devices(gpus, count, wanted, sharing, devices):
    gpus(count)
    for number, device in enumerate(devices):
        found = _device(_rank(number, len(devices)), wanted, sharing=sharing)
        assert found == torch.device(device)
        assert device == "cpu" or gpus.set == found


def test_a_rank_that_sees_its_own_gpus_only_counts_them_from_0(gpus):
    gpus(1)
    for number in (0, 1):
        identity = replace(_rank(number, 2), own_gpus=True)
        assert _device(identity, "auto", sharing=False) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("count", "sharing", "said"),
    [
        (1, False, r"Start 1 rank\(s\) here, let them share GPUs with --transport gloo, or"),
        (0, True, r"only 0 GPU\(s\) are visible. Start 1 rank\(s\) here, or train on the CPU"),
    ],
)
def test_too_few_gpus_are_said(gpus, count, sharing, said):
    gpus(count)
    with pytest.raises(LaunchError, match=said):
        _device(_rank(1, 2), "cuda", sharing=sharing)


@pytest.mark.parametrize(
    ("launcher", "told", "bound", "threads"),
    [
        ("MPICH", None, [range(8)] * 4, 2),
        ("Open MPI", None, [range(4), range(4), range(4, 8), range(4, 8)], 2),
        ("Slurm", None, [range(2), range(2, 4), range(4, 6), range(6, 8)], 2),
        ("Slurm", None, [range(1)] * 4, 1),
        # These launchers set OMP_NUM_THREADS themselves, or start a single rank.
        ("shardwise run", None, [range(8)] * 4, None),
        ("torchrun", None, [range(8)] * 4, None),
        ("python", None, [range(8)], None),
        ("MPICH", "3", [range(8)] * 4, None),
    ],
)
def test_ranks_share_the_cores_that_they_are_bound_to(monkeypatch, launcher, told, bound, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(bound[0]))
    everyone = [["here", list(cores)] for cores in bound] + [["elsewhere", list(bound[0])]]
    group = SimpleNamespace(gather_plain=lambda mine: everyone)
    world = SimpleNamespace(launcher=launcher, host="here", collectives=group)
    _share_cores(world)
    assert set_to == ([] if threads is None else [threads])
