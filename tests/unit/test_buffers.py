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
