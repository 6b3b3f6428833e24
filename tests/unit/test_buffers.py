"""Buffers of models: which are followed as modules come and go."""

import torch
from torch import nn

from shardwise.collectives import Solo
from shardwise.model.buffers import Buffers
from shardwise.model.micro_shard_buffers import MicroShardBuffers
from shardwise.sum_tree import MicroShards


def changed(buffers: Buffers) -> list[str]:
    """The names of those that were seen to change."""
    return [f"{index}.{buffers._places[index][1]}" for index, _ in buffers.news()]


def test_modules_that_come_and_go() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    buffers = Buffers([model], Solo(), left_out=set())
    model(torch.randn(4, 3))
    buffers.follow_agreed()
    assert [each.index for each in buffers._followed] == [0, 1, 2, 3, 4, 5]

    gone = model[0]
    model[0] = nn.BatchNorm1d(3)
    buffers.meet(left_out=set())
    assert all(module is not gone for module, _ in buffers._places)
    assert [each.index for each in buffers._followed] == [0, 1, 2]
    assert [buffers._places[each.index][0] for each in buffers._followed] == [model[2]] * 3
    buffers.remember()
    model(torch.randn(4, 3))
    assert changed(buffers) == ["3.running_mean", "4.running_var", "5.num_batches_tracked"]
    assert buffers.values().numel() == 7


def test_in_the_exact_mode_they_start_from_their_own_values() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    buffers = MicroShardBuffers([model], Solo(), MicroShards(2, 1, 0))
    model[0] = nn.BatchNorm1d(2)
    buffers.meet(left_out=set())
    start = model[0].running_mean.clone()
    for _ in range(2):
        model(torch.randn(4, 2))
        buffers.after_backward()
        assert torch.equal(model[0].running_mean, start)
    assert len(buffers._start) == 6


def test_values_and_means_of_several_dtypes_keep_their_order() -> None:
    module = nn.Module()
    starts = {
        "a": torch.tensor([1.0, 2.0]),
        "count": torch.tensor(3),
        "b": torch.tensor([[4.0], [5.0]], dtype=torch.float64),
        "narrow_values": torch.tensor([6.0], dtype=torch.bfloat16),
        "c": torch.tensor([7.0]),
    }
    for name, value in starts.items():
        module.register_buffer(name, value.clone())
    buffers = Buffers([module], Solo(), left_out=set())
    for value in module.buffers():
        value.add_(0)
    buffers.follow_agreed()
    mine = buffers.values()
    assert mine.dtype == torch.float64
    assert mine.tolist() == [1, 2, 3, 4, 5, 6, 7]

    buffers.average(torch.stack([mine, 2 * mine]), torch.tensor([[1.0], [3.0]]))
    for name, value in starts.items():
        mean = 1.75 * value.double()
        expected = mean if value.is_floating_point() else mean.round()
        assert torch.equal(module.get_buffer(name), expected.to(value.dtype))

    module.narrow_values = torch.zeros(
        2, dtype=torch.bfloat16
    )  # of another shape: followed no longer
    row = buffers.values()
    assert row.isnan().tolist() == [False] * 5 + [True, False]
    buffers.average(row.unsqueeze(0), torch.ones(1, 1))
    assert [buffers._places[each.index][1] for each in buffers._followed] == [
        "a",
        "count",
        "b",
        "c",
    ]
    assert torch.equal(module.narrow_values, torch.zeros(2, dtype=torch.bfloat16))
