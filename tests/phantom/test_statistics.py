"""Exchange of SyncBatchNorm's statistics in turns: which errors are raised, and when."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OrderError


class Crossed(nn.Module):
    """Two BatchNorms that run in any order."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x, order):
        for number in order:
            x = self.norms[number](x)
        return self.head(x)


def refused(world, orders, losses):
    """Return the error of a step whose forwards have these orders, one per rank. The loss is the
    output of one of them."""
    world.engines = 0
    torch.manual_seed(0)
    model = Crossed().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=3, sync_batch_norm=True)
    before = [value.clone() for value in _values(engine, model)]
    try:
        outs = [
            model(torch.randn(4, 6, device=world.device), order) for order in orders[world.rank]
        ]
        engine.backward(outs[losses[world.rank]].square().mean())
        engine.step()
    except OrderError as error:
        said = str(error)
    else:
        said = ""
    assert all(map(torch.equal, before, _values(engine, model))) == bool(said)
    engine.close()
    return said


def _values(engine, model):
    with engine.full_parameters():
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("orders", "losses"),
    [
        ([[(0, 1)], [(1, 0)]], (0, 0)),
        ([[(0,)], [(0, 0)]], (0, 0)),
        ([[(0, 1), (0, 1)], [(0, 1), (0, 1)]], (0, 1)),
        # The third rank skips a BatchNorm, and sees that the others are in different backwards.
        ([[(0, 1), (0, 1)], [(0, 1), (0, 1)], [(1,), (1,)]], (0, 1, 0)),
    ],
    ids=["other orders", "once and twice", "backwards of other forwards", "seen by a third"],
)
def test_different_uses_on_different_ranks_are_refused(phantom, orders, losses):
    found = phantom(len(orders), refused, orders, losses)
    assert all("in the same order" in said for said in found), found


def refused_without_step(world, how, folder):
    """Return the error of `how` after forwards in different orders, without a step in between."""
    world.engines = 0
    torch.manual_seed(0)
    model = Crossed().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=3, sync_batch_norm=True)
    said = ""
    try:
        engine.backward(model(torch.randn(4, 6, device=world.device), (0, 1)).square().mean())
        engine.step()
        model(torch.randn(4, 6, device=world.device), [(0, 1), (1, 0)][world.rank])
        engine.save(folder) if how == "save" else engine.export(folder / "whole.safetensors")
    except OrderError as error:
        said = str(error)
    engine.close()
    return said


@pytest.mark.parametrize("how", ["save", "export"])
def test_forwards_in_disorder_are_refused_before_their_statistics_are_kept(phantom, how, tmp_path):
    found = phantom(2, refused_without_step, how, tmp_path)
    assert all("in the same order" in said for said in found), found
    assert not list(tmp_path.glob("*.safetensors")) + list(tmp_path.glob("step-*"))


def test_equal_uses_are_accepted(phantom):
    orders = [[(0, 1, 0), (1,)]] * 2
    assert phantom(2, refused, orders, (0, 0)) == ["", ""]
