"""Learning rates for larger batches: the formula as a table, and its use in a loop."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim.lr_scheduler import MultiStepLR

import shardwise as sw
from shardwise import lr
from shardwise.errors import ConfigError, ModelError
from shardwise.world.world import World

BASE = 0.1


class Velocity(optim.Optimizer):
    """Momentum with the learning rate inside the velocity, v = m v + lr g."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                v.mul_(group["momentum"]).add_(p.grad, alpha=group["lr"])
                p.sub_(v)


def sgd(**options: Any) -> optim.Optimizer:
    return optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=BASE, **options)


def rates(scheduler: Any, steps: int, *others: Any) -> list[float]:
    """Return the learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        for each in (scheduler, *others):
            each.step()
    return found


@pytest.mark.parametrize(
    ("workers", "scaling", "expected"),
    [(8, "linear", 8), (4, "sqrt", 2), (16, "none", 1), (1, "linear", 1), (0.25, "sqrt", 0.5)],
)
def test_the_factor(workers: float, scaling: str, expected: float) -> None:
    assert lr.factor(workers, scaling) == expected


@given(st.floats(0, 5), st.integers(1, 64))
def test_the_warm_up_is_the_formula_of_the_source(epoch: float, workers: int) -> None:
    scaled = BASE * workers
    told = scaled / workers * (epoch * (workers - 1) / 5 + 1)
    assert BASE * lr.warmed(epoch, 5, workers) == pytest.approx(told, rel=1e-12)


def test_rates_rise_with_each_step_and_reach_base_times_n_at_the_end_of_warm_up() -> None:
    scheduler = lr.ScaledLR(sgd(), steps_per_epoch=100, workers=8, warmup_epochs=5)
    found = rates(scheduler, 600)
    assert found[0] == BASE
    assert found[250] == pytest.approx(BASE * 4.5, rel=1e-12)
    assert found[499] < BASE * 8
    assert found[500:] == pytest.approx([BASE * 8] * 100, rel=1e-12)


def test_fractional_epochs_and_none() -> None:
    found = rates(lr.ScaledLR(sgd(), steps_per_epoch=4, workers=3, warmup_epochs=0.5), 4)
    assert found == pytest.approx([BASE, 2 * BASE, 3 * BASE, 3 * BASE])
    assert rates(lr.ScaledLR(sgd(), steps_per_epoch=4, workers=3, warmup_epochs=0), 1) == [3 * BASE]


def test_can_be_combined_with_another_scheduler() -> None:
    scheduler = lr.ScaledLR(sgd(), steps_per_epoch=2, workers=4, warmup_epochs=1)
    steps = MultiStepLR(scheduler.optimizer, [3], gamma=0.1)
    found = rates(scheduler, 5, steps)
    assert found == pytest.approx([BASE, 2.5 * BASE, 4 * BASE, 0.4 * BASE, 0.4 * BASE])


def test_workers_default_to_those_of_the_run(solo: World) -> None:
    assert sw.lr.ScaledLR(sgd(), steps_per_epoch=1, warmup_epochs=0).multiplier == 1
    solo.size = 6
    assert sw.lr.ScaledLR(sgd(), steps_per_epoch=1, warmup_epochs=0).multiplier == 6


def made(optimizer: optim.Optimizer, workers: int, steps_per_epoch: int) -> lr.ScaledLR:
    return lr.ScaledLR(optimizer, steps_per_epoch=steps_per_epoch, workers=workers, warmup_epochs=2)


def test_a_resume_continues_with_the_same_rates() -> None:
    whole = rates(made(sgd(), 4, 10), 30)
    first = made(sgd(), 4, 10)
    rates(first, 13)
    optimizer = sgd()
    second = made(optimizer, 4, 10)
    optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == [whole[13]]
    assert rates(second, 17) == whole[13:]


def test_a_resume_on_more_workers_keeps_the_epoch() -> None:
    first = made(sgd(), 2, 20)
    rates(first, 20)
    optimizer = sgd()
    second = made(optimizer, 4, 10)
    optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, 20) == pytest.approx(rates(made(sgd(), 4, 10), 30)[10:])


def test_momentum_is_corrected_where_the_rate_is_in_the_velocity() -> None:
    optimizer = Velocity([nn.Parameter(torch.ones(2, 2))], lr=BASE)
    scheduler = lr.ScaledLR(
        optimizer, steps_per_epoch=1, workers=3, warmup_epochs=2, momentum_correction=True
    )
    found = []
    for _ in range(4):
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2)
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["momentum"])
    assert found == pytest.approx([0.9 * 2, 0.9 * 1.5, 0.9, 0.9])


def test_a_resume_on_more_workers_keeps_the_corrected_momentum() -> None:
    def corrected(workers: int, steps_per_epoch: int) -> lr.ScaledLR:
        parameter = nn.Parameter(torch.ones(2, 2))
        parameter.grad = torch.zeros(2, 2)
        return lr.ScaledLR(
            Velocity([parameter], lr=BASE),
            steps_per_epoch=steps_per_epoch,
            workers=workers,
            warmup_epochs=2,
            momentum_correction=True,
        )

    def momenta(scheduler: lr.ScaledLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            rates(scheduler, 1)
            found.append(scheduler.optimizer.param_groups[0]["momentum"])
        return found

    first, second = corrected(2, 20), corrected(4, 10)
    rates(first, 20)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    found = momenta(second, 20)
    assert found == pytest.approx(momenta(corrected(4, 10), 30)[10:])
    assert found[-1] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("optimizer", "complaint"),
    [
        (lambda: sgd(momentum=0.9), "not contain the learning rate"),
        (lambda: optim.RMSprop([nn.Parameter(torch.ones(2, 2))], momentum=0.9), "not contain the"),
        (lambda: optim.AdamW([nn.Parameter(torch.ones(2, 2))]), "no momentum"),
    ],
)
def test_refuses_a_correction_that_would_be_wrong(optimizer: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        lr.ScaledLR(optimizer(), steps_per_epoch=1, workers=2, momentum_correction=True)


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"scaling": "cubic"}, {"warmup_epochs": -1}, {"steps_per_epoch": 0}],
)
def test_refuses_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        lr.ScaledLR(sgd(), **{"steps_per_epoch": 1, "workers": 2} | wrong)
