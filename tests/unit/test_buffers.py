"""Which buffers of models are averaged, and how."""

import pytest
import torch
from torch import nn

from shardwise.comm import Solo
from shardwise.layout.sum_tree import MicroShards
from shardwise.model.buffers import EVERY, FIRST, Buffers
from shardwise.model.micro_shard_buffers import MicroShardBuffers
from shardwise.world.current_batch import Batch


def changed(buffers: Buffers) -> list[str]:
    """Return the names of the buffers that were seen to change."""
    return [f"{index}.{buffers._places[index][1]}" for index in buffers.news()]


def test_added_and_removed_modules_are_followed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    buffers = Buffers([model], Solo(), left_out=set())
    model(torch.randn(4, 3))
    buffers.agree(differ=False)
    assert [each.index for each in buffers._averaged] == [0, 1, 2, 3, 4, 5]

    gone = model[0]
    model[0] = nn.BatchNorm1d(3)
    buffers.meet(left_out=set())
    assert all(module is not gone for module, _ in buffers._places)
    assert [each.index for each in buffers._averaged] == [0, 1, 2]
    assert [buffers._places[each.index][0] for each in buffers._averaged] == [model[2]] * 3
    buffers.remember()
    model(torch.randn(4, 3))
    assert changed(buffers) == ["3.running_mean", "4.running_var", "5.num_batches_tracked"]
    assert buffers.values().numel() == 7


def test_exact_mode_starts_from_the_buffers_own_values() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    buffers = MicroShardBuffers([model], Solo(), MicroShards(2, 1, 0))
    model[0] = nn.BatchNorm1d(2)
    buffers.meet(left_out=set())
    start = model[0].running_mean.clone()
    for _ in range(2):
        model(torch.randn(4, 2))
        buffers.after_backward(None)
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
        "phase": torch.tensor([8 + 9j], dtype=torch.complex64),
    }
    for name, value in starts.items():
        module.register_buffer(name, value.clone())
    buffers = Buffers([module], Solo(), left_out=set())
    for value in module.buffers():
        value.add_(0)
    buffers.agree(differ=False)
    mine = buffers.values()
    assert mine.dtype == torch.float64
    assert mine.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]

    buffers.average(torch.stack([mine, 3 * 2 * mine]), torch.tensor([[1.0], [3.0]]))
    for name, value in starts.items():
        mean = 1.75 * value.to(torch.complex128 if value.is_complex() else torch.float64)
        expected = mean.round() if value.dtype == torch.int64 else mean
        assert torch.equal(module.get_buffer(name), expected.to(value.dtype))

    module.narrow_values = torch.zeros(
        2, dtype=torch.bfloat16
    )  # of another shape: no longer averaged
    assert changed(buffers) == ["3.narrow_values"]
    assert buffers.values().numel() == 9  # the ranks must still agree on it


def of_two(make, *, compares=lambda parameter: False, say=lambda line: None):
    """Return the models of two ranks, and the Buffers of each."""
    models = [make(), make()]
    kept = [Buffers([m], Solo(), set(), alone=False, compares=compares, say=say) for m in models]
    return models, kept


def meet(kept):
    """Exchange as ranks do, within one process: both average what either would."""
    for each in kept:
        each.agree(differ=False)
    rows = torch.stack([each.weighted() for each in kept])
    shares = torch.tensor([each.shares() for each in kept])
    for each in kept:
        each.average(rows, shares)
        each.stepped()


class Tracker(nn.Module):
    """Counts its forward passes, and maintains a running mean of its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.mean(), 0.01)


def test_buffers_are_averaged_by_rows_in_each_batch():
    """Ranks have different shares of a step's batches; rank 1 has no row of the second."""
    models, kept = of_two(Tracker)
    one = Tracker()
    whole = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rows in ([(0, 2), (2, 4)], [(4, 5), (4, 4)], [(0, 2), (2, 4)]):
        total = sum(end - first for first, end in rows)
        for model, each, (first, end) in zip(models, kept, rows, strict=True):
            batch = Batch(samples=end - first, whole=total)
            each.before_batch(batch)
            model(whole[first:end] if end > first else whole[:1])
            each.after_backward(batch)
        one(whole[min(first for first, _ in rows) : max(end for _, end in rows)])
    meet(kept)
    for model in models:
        assert model.calls == 3
        # Each rank's own mean decays in between, so terms in 0.01 squared remain.
        assert abs(model.mean - one.mean) < 3 * 0.01**2
    assert kept[0].rows == 4


def test_a_batch_that_is_handed_out_ahead_changes_no_share():
    models, kept = of_two(Tracker)
    batches = [Batch(samples=4, whole=8), Batch(samples=1, whole=1)]
    for number, (model, each) in enumerate(zip(models, kept, strict=True)):
        for batch in batches:
            each.before_batch(batch)
        model(torch.full((4,), float(number), dtype=torch.float64))
        each.after_backward(batches[0])
    meet(kept)
    assert models[0].mean == models[1].mean == pytest.approx(0.005)


def test_a_stand_in_whose_buffers_are_infinite_counts_nothing():
    models, kept = of_two(Tracker)
    models[1].mean.fill_(torch.inf)
    for samples, model, each in zip((1, 0), models, kept, strict=True):
        model(torch.ones(1, dtype=torch.float64))
        each.after_backward(Batch(samples=samples, whole=1))
    meet(kept)
    assert models[1].mean == models[0].mean == pytest.approx(0.01)


class Codebook(nn.Module):
    """Writes its table in ways that torch does not count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(70))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.table.data.add_(1),
        lambda model: model.table.numpy().__setitem__(69, 1),
        lambda model: model.mask.data.logical_not_(),
        lambda model: model.frozen.add_(1),
        lambda model: model.table.data.copy_(model.table.flip(0)),
    ],
    ids=["data", "numpy", "bool", "frozen", "order"],
)
def test_the_checksum_detects_writes_that_torch_does_not_count(change):
    models, kept = of_two(Codebook, compares=lambda parameter: True)
    for model in models:
        model.table.data.copy_(torch.arange(70.0))
    assert kept[0].checksum() == kept[1].checksum() != 0
    with torch.no_grad():
        change(models[1])
    assert not kept[1].news()
    assert kept[0].checksum() != kept[1].checksum()


def test_checksums_are_compared_in_the_first_steps_and_then_occasionally():
    _, (kept, _) = of_two(Codebook)
    compared = []
    for step in range(3 * EVERY):
        compared += [step] if kept.checksum() else []
        kept.stepped()
    assert compared == [*range(FIRST), EVERY, 2 * EVERY]


def test_averaged_buffers_are_not_in_the_checksum():
    """Averaged buffers differ before the step and are identical after it."""
    models, kept = of_two(Tracker)
    models[0](torch.ones(1, dtype=torch.float64))
    kept[0].agree(differ=False)
    kept[1].checksum()
    first = kept[0].checksum()
    models[0](torch.ones(1, dtype=torch.float64))
    assert kept[0].checksum() == first


def test_frozen_parameters_that_change_equally_are_not_averaged():
    """For example target networks."""
    models, kept = of_two(Codebook, compares=lambda parameter: True)
    for model, each in zip(models, kept, strict=True):
        with torch.no_grad():
            model.frozen.add_(1)
        assert not each.news()
    assert kept[0].checksum() == kept[1].checksum()


def test_a_parameter_that_is_trained_now_is_dropped():
    model = Codebook()
    kept = Buffers([model], Solo(), set(), alone=False, compares=lambda parameter: True)
    assert [key for _, key in kept._places] == ["table", "mask", "frozen"]
    model.frozen.requires_grad_(True)
    kept.meet(set())
    assert [key for _, key in kept._places] == ["table", "mask"]


def test_an_integer_buffer_with_a_fractional_mean_is_named():
    said = []

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("others", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    models, kept = of_two(lambda: nn.Sequential(Counter()), say=said.append)
    for rows, model, each in zip((4, 5), models, kept, strict=True):
        model[0].others += 1
        model[0].seen += rows
        each.after_backward(None)
    meet(kept)
    assert "integer buffer 0.seen differently on each worker" in said[0]
    assert models[0][0].others.tolist() == [1, 1]


def test_buffers_created_in_inference_mode_are_averaged():
    def made():
        module = Tracker()
        with torch.inference_mode():
            module.mean = torch.ones((), dtype=torch.float64)
        return module

    models, kept = of_two(made)
    for number, (model, each) in enumerate(zip(models, kept, strict=True)):
        model.calls += 1
        with torch.inference_mode():
            model.mean.add_(number)
        each.after_backward(None)
    meet(kept)
    assert models[0].mean == models[1].mean == 1.5
    kept[0].keep()
    with torch.inference_mode():
        models[0].mean.zero_()
    kept[0].restore()
    assert models[0].mean == 1.5


def test_uncounted_writes_do_not_reach_the_next_micro_shard():
    model = Codebook()
    buffers = MicroShardBuffers([model], Solo(), MicroShards(2, 1, 0))
    for _ in range(2):
        buffers.before_batch(Batch(samples=1))
        assert not model.table.any()
        model.table.data.add_(1)
        buffers.after_backward(Batch(samples=1))
    buffers.agree(differ=False)
    buffers.average(buffers.weighted().unsqueeze(0), torch.tensor([buffers.shares()]))
    assert torch.equal(model.table, torch.ones(70))
    buffers.stepped()
    model.table.data.fill_(5)  # by user code, between steps
    buffers.before_batch(Batch(samples=1))
    buffers.after_backward(Batch(samples=1))
    assert torch.equal(model.table, torch.full((70,), 5.0))


def test_backwards_of_unknown_size_count_equally():
    _, (one, other) = of_two(Tracker)
    one.after_backward(None)
    one.after_backward(None)
    other.after_backward(None, 3)
    assert (one.shares(), other.shares()) == ([1.0], [3.0])
    assert other.shares(counts=False) == [0.0]
