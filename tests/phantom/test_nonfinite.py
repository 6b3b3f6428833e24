"""A non-finite gradient on the device: which rank is named, and the cost for a good step."""

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import NonFiniteError
from tests.phantom import cases


def blamed(world, zero, by_loss):
    """Return the synchronisations of a good step, and the message about a NaN in rank 1's input."""
    from tests.phantom.streams import Device

    x, y = (value.cpu() for value in cases.batch(world, 0))
    bad = 5 if by_loss else None
    columns = torch.cat([x, x]), torch.cat([y, y])
    if by_loss:
        columns[0][cases.ROWS + bad, 0] = torch.nan
    world.engines = 0
    model, optimizer = cases.made(world)
    engine = sw.Engine(model, optimizer, zero=zero)
    waits, message = 0, ""
    loader = sw.Loader(TensorDataset(*columns), batch_size=cases.ROWS, shuffle=False)
    for number, step in enumerate(loader.steps()):
        Device.order.begin()
        for a, b in step:
            loss = cases.loss_of(model, a, b)
            if number and not by_loss and world.rank:
                loss = loss + (model.head.bias * 0).sqrt().sum() * 0
            engine.backward(loss)
        if number == 0:
            engine.step()
            waits = sum(n for k, n in Device.order.synchronisations.items() if "engine/step" in k)
            continue
        with pytest.raises(NonFiniteError) as caught:
            engine.step()
        message = str(caught.value)
    engine.close()
    return waits, message


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.full)])
def test_names_rank_and_samples(phantom, zero):
    for waits, message in phantom(2, blamed, zero, True):
        assert waits <= 1
        assert "the gradient is not finite in blocks.0.down.bias" in message
        assert "The cause is rank 1 (its loss; samples 12, 13, 14, 15)." in message


def test_names_parameter_and_rank_if_the_loss_is_finite(phantom):
    for waits, message in phantom(2, blamed, 0, False):
        assert waits <= 1
        assert "the gradient is not finite in head.bias. The cause is rank 1 (its grad" in message
