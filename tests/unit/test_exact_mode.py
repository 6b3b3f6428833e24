"""The checks of the exact mode, and its sums over reports of ranks."""

import math

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import config
from shardwise.comm import Solo
from shardwise.config import Settings
from shardwise.engine.exact_mode import ExactAggregation, check
from shardwise.engine.step_statistics import Aggregation
from shardwise.errors import ConfigError, UsageError
from shardwise.layout.sum_tree import MicroShards


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"micro_batch_size": 2}, "--exact 4 cannot be combined with --micro-batch-size"),
        ({"micro_batch_tokens": 2}, "--exact 4 cannot be combined with --micro-batch-tokens"),
        ({"sync_batch_norm": True}, "without it each micro-shard has its own"),
        ({"shard_within": "host"}, "Write --shard-within all"),
    ],
)
def test_refuses_settings_that_cannot_be_combined(settings, said):
    with pytest.raises(ConfigError, match=said):
        check(Settings(exact=4, **settings), Solo())


def test_checks_nothing_if_off():
    check(Settings(sync_batch_norm=True), Solo())


def test_it_is_for_the_whole_run():
    with pytest.raises(ConfigError, match=r"exact is not a setting of the engine: pass it to sw"):
        config.refuse_elsewhere({"exact": 4}, "engine")


def test_numbers_are_rounded_once():
    """The number of a micro-shard is the same on any rank."""
    values = [0.1, 1e16, 0.3, -1e16]
    alone, both = ExactAggregation(MicroShards(4, 1, 0)), ExactAggregation(MicroShards(4, 2, 0))
    assert alone.total([alone.report(values)]) == 0.4
    assert both.total([both.report(values[::2]), both.report(values[1::2])]) == 0.4
    assert Aggregation(0).total([Aggregation(0).report(values)]) != 0.4
    assert math.isnan(alone.total([[math.inf, -math.inf, 0.0, 0.0]]))


def test_draws_are_by_micro_shard():
    alone = [ExactAggregation(MicroShards(4, 1, 0)).seed(5, 0, 3, turn) for turn in range(4)]
    second = [ExactAggregation(MicroShards(4, 2, 1)).seed(5, 0, 3, turn) for turn in range(2)]
    assert second == alone[1::2]
    assert len(set(alone)) == 4


def model_and_engine(**settings):
    model = nn.Linear(3, 1)
    return model, sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@pytest.fixture
def exact(solo, monkeypatch):
    monkeypatch.setenv("SHARDWISE_EXACT", "4")
    solo.settings = solo.settle()
    return solo


def test_a_step_of_another_number_of_backwards_is_refused(exact):
    model, engine = model_and_engine()
    engine.backward(model(torch.ones(1, 3)).mean())
    said = "--exact 4 on 1 worker needs 4 backwards per worker and step, but this step had 1"
    with pytest.raises(UsageError, match=said):
        engine.step()
    engine.close()


def test_prints_a_line_at_the_start(exact, capsys):
    _, engine = model_and_engine()
    engine.close()
    assert capsys.readouterr().out.splitlines()[2] == (
        "  exact: 4 micro-shards per step, summed in one tree, one thread per worker: the same "
        "bits on 1, 2, 4 workers"
    )


def test_statistics_are_means_over_micro_shards(exact):
    """Each micro-shard starts from the same statistics; the next step from loaded ones."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 1))
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 3)
    loader = sw.Loader(torch.utils.data.TensorDataset(x), 8)
    start = torch.zeros(3)
    for step in loader.steps():
        for (rows,) in step:
            assert torch.equal(model[0].running_mean, start)
            engine.backward(model(rows).mean())
        engine.step()
        rows = x[8 * step.number :][:8]
        torch.testing.assert_close(model[0].running_mean, 0.5 * start + 0.5 * rows.mean(0))
        assert model[0].num_batches_tracked == step.number + 1
        start = torch.tensor([1.0, 2.0, 3.0])
        model[0].running_mean.copy_(start)
    engine.close()


class Sleeper(nn.Module):
    """A model whose first layer is unused until `awake` is set."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(200, 200), nn.Linear(200, 200)
        self.awake = False

    def forward(self, x):
        return self.second(self.first(x) if self.awake else x).square().mean()


class Joining(nn.Module):
    """A model that a layer joins. Its gradient arrives before the gradients of lower layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.late, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.joins = False

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.late(x) if self.joins else x)


def test_names_an_unexpected_gradient(exact):
    model = Joining()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model.joins = step == 2
        for _ in range(4):
            engine.backward(model(torch.ones(1, 4)).square().mean())
        if step < 2:
            engine.step()
    with pytest.raises(UsageError, match=r"gradient of late.weight and 1 more was not expected"):
        engine.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_after_its_sum_is_refused(exact, overlap):
    """If sums start during backward, the gradient of a new branch is late for its bucket."""
    model = Sleeper()
    engine = sw.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=overlap, bucket_mb=0.01
    )
    for step in range(4):
        model.awake = step == 3
        for _ in range(4):
            engine.backward(model(torch.ones(1, 200)))
        if step == 3 and overlap:
            with pytest.raises(UsageError, match=r"first.* was not expected: .* --no-overlap"):
                engine.step()
        else:
            engine.step()
    engine.close()
