"""Modules that Lightning builds without memory train from the values of a plain build."""

import itertools

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.distributed.test_lightning import (
    Model,
    alike,
    calm,
    fabric_library,
    fitted,
    ours,
    ranks,
    trainer,
)


def junk():
    """Fill memory that is allocated next, so that uninitialised weights are seen."""
    blocks = [torch.full((36,), 7.0) for _ in range(200)]
    del blocks


def empty(strategy, make):
    """Return a Trainer, and a model that `make` builds inside its `init_module`."""
    with calm():
        made = trainer(strategy, max_epochs=1)
        junk()
        with made.init_module(empty_init=True):
            return made, make()


def trained_case(world, zero):
    _, expected, _ = fitted("auto", max_epochs=1)
    made, model = empty(ours(zero), lambda: Model(world.size))
    assert model.net[0].weight.is_meta == (zero == 3)
    with calm():
        made.fit(model)
    alike(model, expected)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_empty_init_trains_from_the_values_of_a_plain_build(group, zero):
    ranks(group, 2)(trained_case, zero)


def cast_case(world):
    """Cast a module with the precision plugin, built inside its block or before."""
    options = {"max_epochs": 1, "precision": "64-true"}
    with calm():
        stock = trainer("auto", **options)
        with stock.init_module():
            drawn_in_fp64 = Model()
        stock.fit(drawn_in_fp64)
        made = trainer(ours(3), **options)
        with made.init_module(empty_init=True):
            model = Model(world.size)
        made.fit(model)
        _, drawn_in_fp32, _ = fitted("auto", **options)
        with sw.on_meta():
            other = Model(world.size)
        fitted(ours(3), model=other, **options)
    assert model.scale.dtype == other.scale.dtype == torch.float64
    alike(model, drawn_in_fp64, 1e-8)
    alike(other, drawn_in_fp32, 1e-8)


def test_empty_init_follows_the_precision(group):
    ranks(group, 2)(cast_case)


def evaluated_case(world):
    with calm():
        expected = trainer("auto").validate(Model(), verbose=False)
        made, model = empty(ours(3), lambda: Model(world.size))
        found = made.validate(model, verbose=False)
    assert found[0]["valid"] == pytest.approx(expected[0]["valid"], rel=1e-5)


def test_an_empty_module_is_evaluated_with_the_values_of_a_plain_build(group):
    ranks(group, 2)(evaluated_case)


def resumed_case(world, path):
    options = {"max_epochs": 1}
    first, model, _ = fitted(ours(3), world.size, **options)
    with calm():
        first.save_checkpoint(path)
        made, again = empty(ours(3), lambda: Model(world.size))
        made.fit(again, ckpt_path=path, weights_only=False)
    alike(again, model, 0)


def test_a_checkpoint_is_loaded_into_an_empty_module(group, tmp_path):
    ranks(group, 2)(resumed_case, str(tmp_path / "last.ckpt"))


def written_late_case(world):
    made, model = empty(ours(3), lambda: Model(world.size))
    with calm():
        model.load_state_dict(Model().state_dict())
        made.fit(model)


def test_weights_loaded_into_memory_that_is_not_there_are_refused(group):
    errors = ranks(group, 2).func.errors(written_late_case)
    assert {kind for kind, _ in errors} == {ModelError.__name__}
    assert "was written after the block that built it" in errors[0][1]


class Rotary(Model):
    """A buffer that only `reset_parameters` of its module computes."""

    class Angles(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", torch.empty(4))
            self.reset_parameters()

        def reset_parameters(self):
            self.angles.copy_(torch.arange(4.0))

    def __init__(self, share=1):
        super().__init__(share)
        del self.scale  # has no reset_parameters to fill it
        self.register_parameter("scale", None)
        self.cache = self.Angles()

    def loss(self, batch):
        x, y = batch
        return (self(x + self.cache.angles) - y).square().mean()


def meta_case(world, zero):
    """Use modules that define reset_parameters, as in scripts for FSDPStrategy."""
    with torch.device("meta"):
        model = Rotary(world.size)
    fitted(ours(zero), model=model, max_epochs=1)
    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        assert layer.weight.abs().max() < layer.in_features**-0.5 + 0.2
    assert model.cache.angles.tolist() == [0.0, 1.0, 2.0, 3.0]
    states = world.gather([value.sum().item() for value in model.state_dict().values()])
    assert states[0] == states[1]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_on_the_meta_device_is_set_by_reset_parameters(group, zero):
    ranks(group, 2)(meta_case, zero)


def fabric_case(world, zero):
    """Weights are loaded, and layers initialised, before the module is set up."""
    from shardwise.lightning import ShardwiseFabricStrategy

    with calm():
        fabric = fabric_library.Fabric(
            accelerator="cpu",
            devices=1,
            strategy=ShardwiseFabricStrategy(zero=zero, quiet=True),
        )
        fabric.launch()
        junk()
        torch.manual_seed(3)
        with fabric.init_module(empty_init=True):
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
        model.load_state_dict({n: value + 1 for n, value in plain.state_dict().items()})
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.0))
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        fabric.strategy.training.close()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other + 1)


@pytest.mark.parametrize("zero", [0, 3])
def test_fabric_gives_memory_at_once(group, zero):
    ranks(group, 2)(fabric_case, zero)


def fabric_meta_case(world):
    from shardwise.lightning import ShardwiseFabricStrategy

    with calm():
        strategy = ShardwiseFabricStrategy(zero=3, quiet=True)
        fabric = fabric_library.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        with torch.device("meta"):
            model = nn.Linear(4, 2)
        model = fabric.setup_module(model)
        assert not any(p.is_meta for p in model.parameters())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in itertools.repeat(None, 2):
            fabric.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
        fabric.strategy.training.close()
    assert all(p.isfinite().all() for p in model.parameters())


def test_fabric_sets_a_model_on_the_meta_device(group):
    ranks(group, 2)(fabric_meta_case)
