"""Offload of the tensors that autograd saves: which ones, how often, and their values."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.model import activation_offload
from shardwise.model.activation_offload import SavedTensors
from shardwise.model.activations import OffloadScope
from shardwise.model.offloaded_tensor import DiskTarget, StagedDiskTarget
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import DeviceSpool
from shardwise.tiers.spool import Spool
from tests.unit.activations.models import CPU, make, x


class Recorded:
    """A target that counts the tensors sent to it."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[int] = []
        spool = Spool(folder, "activations", rank=0)
        self._place = StagedDiskTarget(DeviceSpool(spool, CopyStream(CPU)))

    def send(self, data: Tensor) -> Any:
        self.sent.append(data.numel())
        return self._place.send(data)


def saving(folder: Path, *models: nn.Module) -> tuple[SavedTensors, Recorded]:
    place = Recorded(folder)
    saved = SavedTensors(place, "cpu")
    saved.begin(models)
    return saved, place


def test_parameters_buffers_and_small_tensors_stay(folder: Path) -> None:
    model = make()
    saved, place = saving(folder, model)
    weight = model.blocks[0].first.weight
    for tensor in (weight, weight.t(), weight.detach()[3:], model.blocks[0].norm.running_mean):
        assert saved.unpack(saved.pack(tensor)) is tensor
    small = torch.ones(3)
    assert saved.unpack(saved.pack(small)) is small
    assert place.sent == []


def test_views_of_one_storage_are_written_once(folder: Path) -> None:
    saved, place = saving(folder)
    whole = torch.randn(4, 300)
    views = [whole[:, :100], whole[:, 100:200].t(), whole, whole.view(-1)]
    held = [saved.pack(view) for view in views]
    assert place.sent == [4 * 300 * 4]
    wanted = [(view.clone(), view.stride()) for view in views]
    del whole, views
    for one, (value, stride) in zip(held, wanted, strict=True):
        back = saved.unpack(one)
        assert torch.equal(back, value)
        assert back.stride() == stride


def test_only_the_slice_of_a_large_storage_is_moved(folder: Path) -> None:
    saved, place = saving(folder)
    data = torch.randn(1000, 32)
    row, column = data[7:9], data[:, 3]
    held = [saved.pack(row), saved.pack(column)]
    assert place.sent == [2 * 32 * 4]
    assert torch.equal(saved.unpack(held[0]), row)
    assert saved.unpack(held[1]) is column


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_every_dtype_and_layout_is_restored(folder: Path, dtype: torch.dtype) -> None:
    saved, _ = saving(folder)
    tensors = [
        torch.randn(8, 9).to(dtype),
        torch.randn(6, 8, 9).to(dtype)[1:, ::2, 3:].transpose(0, 2),
        torch.randn(100).to(dtype)[:, None].expand(-1, 5),
        torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last),
    ]
    held = [saved.pack(tensor) for tensor in tensors]
    for _ in range(2):
        for one, tensor in zip(reversed(held), reversed(tensors), strict=True):
            back = saved.unpack(one)
            assert torch.equal(back, tensor)
            assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())


def test_memory_is_freed_in_forward_and_on_the_way_back(folder: Path) -> None:
    saved, _ = saving(folder)
    held, alive = [], []
    for number in range(50):
        tensor = torch.full((1024,), float(number))
        alive.append(activation_offload.StorageWeakRef(tensor.untyped_storage()))
        held.append(saved.pack(tensor))
        del tensor
        assert sum(not one.expired() for one in alive) <= 4096 // 4096 + 2
    for number in reversed(range(50)):
        assert torch.equal(saved.unpack(held.pop()), torch.full((1024,), float(number)))
        assert sum(piece.nbytes for piece in saved._pieces_back()) <= 2 * 4096
    assert not saved._by_number


def test_what_backward_does_not_need_frees_the_disk(folder: Path) -> None:
    spool = Spool(folder, "activations", rank=0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    OffloadScope([model], SavedTensors(DiskTarget(spool), "cpu")).attach(model)
    for rows in (50, 70):
        loss = model(x(rows=rows)).sum()
        assert spool.in_use > 0
        del loss
        gc.collect()
        model(x())  # settles pending copies
        gc.collect()
    assert spool.in_use <= 4096 * 4


def test_a_change_in_place_before_the_copy_is_an_error(folder: Path) -> None:
    saved, _ = saving(folder)
    small, large = torch.ones(3), torch.ones(4096)
    held = [saved.pack(small), saved.pack(large)]
    for tensor in (small, large):
        tensor.add_(1)
    for one, shape in zip(held, ("3,", "4096,"), strict=True):
        with pytest.raises(UsageError, match=rf"shape \({shape}\) .* changed in place"):
            saved.unpack(one)


def test_a_change_in_place_after_the_copy_gives_the_saved_value(folder: Path) -> None:
    saved, _ = saving(folder)
    tensor = torch.ones(4096)
    held = saved.pack(tensor)
    held.piece.settle()
    tensor.add_(1)
    again = saved.pack(tensor)
    assert saved.unpack(held).unique().tolist() == [1.0]
    assert saved.unpack(again).unique().tolist() == [2.0]
