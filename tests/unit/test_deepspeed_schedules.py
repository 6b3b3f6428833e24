"""DeepSpeed's schedules: values computed by DeepSpeed itself, and rejected arguments."""

import json
from pathlib import Path

import pytest
import torch

from shardwise.deepspeed import schedules
from shardwise.errors import ConfigError

FIGURES = json.loads((Path(__file__).parent / "deepspeed_schedules.json").read_text())["figures"]


def optimizer():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW(
        [{"params": [weights[0]], "lr": 0.01}, {"params": [weights[1]], "lr": 0.02}]
    )


def rates(each):
    return [g["lr"] for g in each.param_groups] + [g["betas"][0] for g in each.param_groups]


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row['name']}-{row['params']}")
def test_rates_and_betas_are_those_of_deepspeed(row):
    """The file has the command that made it."""
    face = optimizer()
    schedule = schedules.BY_NAME[row["name"]](face, **row["params"])
    for expected in row["rates"]:
        assert rates(face) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        schedule.step()
    assert schedule.get_last_lr() == schedule.get_lr() == rates(face)[:2]


@pytest.mark.parametrize("row", FIGURES[::3], ids=lambda row: row["name"])
def test_a_schedule_goes_on_from_its_state(row):
    face, other = optimizer(), optimizer()
    kind = schedules.BY_NAME[row["name"]]
    schedule, later = kind(face, **row["params"]), kind(other, **row["params"])
    for _ in range(5):
        schedule.step()
    later.load_state_dict(schedule.state_dict())
    schedule.step()
    later.step()
    assert rates(face) == rates(other)


def test_every_schedule_of_the_json_has_figures():
    assert {row["name"] for row in FIGURES} == set(schedules.BY_NAME)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_an_unknown_warmup_is_logarithmic(name):
    params = {} if name == "WarmupLR" else {"total_num_steps": 9}
    face, other = optimizer(), optimizer()
    with pytest.warns(
        UserWarning, match="warmup_type must be log or linear, not 'cubic': log is used"
    ):
        odd = schedules.BY_NAME[name](face, warmup_type="cubic", **params)
    log = schedules.BY_NAME[name](other, **params)
    for schedule in (odd, log):
        for _ in range(4):
            schedule.step()
    assert rates(face) == rates(other)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, "1 values, but the optimizer has 2 groups"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "above 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 1.5}, "an integer of 1 or more"),
    ],
)
def test_what_a_schedule_does_not_take(name, params, words):
    with pytest.raises(ValueError, match=words) as caught:
        schedules.BY_NAME[name](optimizer(), **params)
    assert isinstance(caught.value, ConfigError)
