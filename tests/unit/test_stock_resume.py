"""A resumed run is compared with one that was not stopped, and what is lost is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.tools.verify.runs import RunFailed
from shardwise.tools.verify.stock import stock_resume
from shardwise.tools.verify.stock.stock_resume import ResumeResult
from shardwise.tools.verify.stock.stock_runs import StockCommand, StockRecords
from shardwise.tools.verify.verdicts import TrainingVerdict
from tests.unit.test_stock_recorder import record

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def train(file: Path, mistake: str) -> None:
    """Train, save every second step, and go on from the file if there is one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    done = 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        if mistake != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        if mistake != "scheduler":
            scheduler.load_state_dict(state["scheduler"])
        if mistake != "random":
            torch.set_rng_state(state["random"])
        if mistake == "parameters":
            nn.init.zeros_(model[2].weight)
        done = 0 if mistake == "samples" else state["done"]
    if mistake == "seed":
        torch.seed()
    for step in range(done, 8):
        optimizer.zero_grad()
        model(ROWS[2 * step : 2 * step + 2]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step % 2 and mistake != "never":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}
            torch.save(state | {"done": step + 1}, file)


class Runs:
    """Makes the runs in processes of this one, on one rank."""

    def __init__(self, folder: Path, mistake: str) -> None:
        self._folder, self._mistake = folder, mistake

    def _record(self, name: str, file: str, **request: Any) -> StockRecords:
        folder = self._folder / name
        folder.mkdir()
        script: Callable[[], None] = lambda: train(self._folder / file, self._mistake)  # noqa: E731
        return record(folder, script, **{"steps": 8} | request)

    def ranks(self, words: str) -> StockRecords:
        return self._record("whole", "whole.pt")

    def new_view(self) -> Path:
        return self._folder / "view"

    def stopped_ranks(self, words: str, step: int, view: Path) -> StockRecords:
        return self._record("stopped", "last.pt", stop_at=step)

    def resumed_ranks(self, words: str, command: StockCommand, view: Path) -> StockRecords:
        if self._mistake == "fails":
            raise RunFailed(words, 1, "no such file")
        return self._record("resumed", "last.pt")


@pytest.mark.parametrize(
    ("mistake", "cause", "start"),
    [
        ("none", None, 4),
        ("optimizer", "optimizer state", 4),
        ("scheduler", "learning rate", 4),
        ("random", "random state", 4),
        ("samples", "samples", 4),
        ("parameters", "parameters", None),
        ("never", "does not resume", 0),
        ("fails", "does not resume", None),
    ],
)
def test_names_what_is_not_restored(
    tmp_path: Path, mistake: str, cause: str | None, start: int | None
) -> None:
    result = verify(tmp_path, mistake)
    assert [each.name for each in result.findings][:1] == ([cause] if cause else [])
    assert result.verdict is (TrainingVerdict.DIFFERS if cause else TrainingVerdict.BITS)
    assert result.resumed_from == start
    if cause is None:
        assert result.steps == 4


def test_does_not_judge_a_script_without_a_seed(tmp_path: Path) -> None:
    result = verify(tmp_path, "seed")
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "not deterministic" in result.why


def test_does_not_judge_a_script_that_ends_before(tmp_path: Path) -> None:
    result = verify(tmp_path, "none", stop_at=8)
    assert result.verdict is TrainingVerdict.UNPROVED
    assert "ends after 8 steps" in result.why


def verify(folder: Path, mistake: str, stop_at: int = 5) -> ResumeResult:
    runs: Any = Runs(folder, mistake)
    return stock_resume.verify(runs, stop_at, StockCommand(words=["train.py"]))
