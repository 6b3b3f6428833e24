"""Two engines of one script, saved and resumed together."""

import json
import shutil

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import BrokenCheckpoint, UsageError


def pair(zero):
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)).double() for _ in range(2)]
    engines = [sw.Engine(m, torch.optim.Adam(m.parameters(), lr=0.1), zero=zero) for m in models]
    return models, engines, sw.Engines(maker=engines[0], judge=engines[1])


def step(models, engines, which):
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    engines[which].backward(models[which](sw.world().share(x)).square().mean())
    return engines[which].step().loss


ORDER = (1, 1, 0, 1, 1, 0)
"""The judge makes two steps for each step of the maker, which steps last."""


def trained_case(world, folder, zero, first, last, saves):
    """Return losses of the steps from `first` on. The last engine to step seeds dropout."""
    models, engines, both = pair(zero)
    number = both.resume(folder)
    losses = [step(models, engines, which) for which in ORDER[first:last]]
    if saves:
        both.save(folder, keep=1)
    for engine in engines:
        engine.close()
    return losses, number, [engine.steps for engine in engines]


def test_they_resume_together(group, tmp_path):
    whole, _, _ = group(2)(trained_case, tmp_path / "a", 0, 0, 6, False)[0]
    first, number, _ = group(2)(trained_case, tmp_path / "b", 2, 0, 3, True)[0]
    assert number == 0
    second, number, steps = group(2)(trained_case, tmp_path / "b", 2, 3, 6, True)[0]
    assert (number, steps) == (1, [2, 4])
    assert first + second == pytest.approx(whole, rel=1e-12)
    assert [path.name for path in tmp_path.glob("b/together-*")] == ["together-2.json"]
    told = json.loads((tmp_path / "b/together-2.json").read_text())
    assert (told["steps"], told["last"]) == ({"maker": 2, "judge": 4}, "maker")


def killed_case(world, folder):
    """One engine has saved and the other has not: a resume uses the last joint save."""
    models, engines, both = pair(0)
    both.resume(folder)
    step(models, engines, 0)
    engines[0].save(folder / "maker")
    for engine in engines:
        engine.close()


def test_a_resume_ignores_a_save_of_one_engine_only(group, tmp_path):
    group(2)(trained_case, tmp_path, 0, 0, 3, True)
    group(2)(killed_case, tmp_path)
    _, number, steps = group(1)(trained_case, tmp_path, 0, 3, 3, False)[0]
    assert (number, steps) == (1, [1, 2])
    shutil.rmtree(tmp_path / "judge")
    with pytest.raises(Exception, match="but no complete save of maker and judge together"):
        group(1)(trained_case, tmp_path, 0, 3, 3, False)


def names_case(world):
    with pytest.raises(UsageError, match="takes engines by name"):
        sw.Engines()
    with pytest.raises(UsageError, match="takes an engine, and its name"):
        sw.Engines(maker=nn.Linear(1, 1))


def test_refuses_arguments_that_are_no_engines(group):
    group(1)(names_case)
    assert issubclass(BrokenCheckpoint, Exception)
