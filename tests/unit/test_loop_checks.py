"""Backwards without a step: a warning at the end of a run, only if they are a mistake."""

import gc
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.world import world
from shardwise.world.step_log import StepLog
from shardwise.world.world import World


def trained(steps: list[int]) -> sw.Engine:
    """Return an engine after steps with these numbers of backward passes.

    Negative: without the step.
    """
    model = torch.nn.Linear(2, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    for backwards in steps:
        for _ in range(abs(backwards)):
            engine.backward(model(torch.ones(3, 2)).mean())
        if backwards > 0:
            engine.step()
    return engine


@pytest.mark.parametrize(
    ("steps", "begin"),
    [
        ([-1], "1 backward was never followed by a step, so the model did not learn from it: "),
        ([2, -3], "3 backwards were never followed by a step, so the model did not learn from "),
        ([2, 1], ""),
        ([], ""),
    ],
)
def test_counts_backwards_without_a_step(solo: World, steps: list[int], begin: str) -> None:
    trained(steps).close()
    words = solo.unstepped.words()
    assert words.startswith(begin)
    assert bool(words) == bool(begin)
    assert not words or words.endswith("call engine.step() after engine.backward(loss).")


def test_warns_of_engines_that_are_gone(solo: World, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        trained([1, -2])
        gc.collect()
    world.leave()
    world.leave()
    assert capfd.readouterr().err.count("shardwise: 4 backwards were never followed") == 1


def test_only_rank_0_warns(solo: World, capfd: pytest.CaptureFixture[str]) -> None:
    solo.is_main = False
    trained([-1])
    world.leave()
    assert capfd.readouterr().err == ""


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("by the user")


class TestNoWarning:
    """No warning is printed, because an error or the user has stopped the run."""

    @pytest.fixture(autouse=True)
    def silent(self, capfd: pytest.CaptureFixture[str], solo: World) -> object:
        yield
        world.leave()
        assert capfd.readouterr().err == ""

    def test_of_a_backward_that_failed(self) -> None:
        model = torch.nn.Linear(2, 1)
        engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
        engine.backward(model(torch.ones(3, 2)).mean())
        loss = model(torch.ones(3, 2)).mean()
        loss.register_hook(_fail)
        with pytest.raises(ValueError, match="by the user"):
            engine.backward(loss)

    def test_of_a_step_that_failed(self) -> None:
        with pytest.raises(UsageError, match="max_norm must be"):
            trained([-1]).step(max_norm=-1.0)

    def test_after_an_exception_of_the_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        trained([-1])

    def test_of_a_run_that_was_stopped_after_steps(self, solo: World, tmp_path: Path) -> None:
        solo.step_log = StepLog(None, 0, stop_after=1)
        other = torch.nn.Linear(2, 1)
        second = sw.Engine(other, torch.optim.SGD(other.parameters(), lr=0.1), quiet=True)
        solo.engines = 0  # the first engine is the one that steps
        second.backward(other(torch.ones(3, 2)).mean())
        with pytest.raises(SystemExit):
            trained([1])
