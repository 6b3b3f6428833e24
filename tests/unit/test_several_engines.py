"""Engines saved together: joint saves, full disks, and signals during a save."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.engine import Engine
from shardwise.engine import engines as several
from shardwise.errors import CheckpointNotWritten
from shardwise.net import progress
from shardwise.net.environment import RANK_VARIABLE, REPORTS_VARIABLE
from shardwise.net.progress import ProgressWriter
from shardwise.world.world import World
from tests.unit.two_engines import engines, step

__all__ = ["engines"]


def told(path: Path) -> Any:
    return json.loads(path.read_text())


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def refused(*_: Any, **__: Any) -> None:
    raise CheckpointNotWritten("the disk takes no more")


def test_an_older_save_is_invalid_once_a_checkpoint_is_replaced(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, seen = sw.Engines(one=engines[0], other=engines[1]), {"batches": 1}
    engines[0].track(seen=seen)
    both.save(tmp_path)
    for engine in engines:
        step(engine)
    both.save(tmp_path)
    step(engines[1])
    seen["batches"] = 5
    with monkeypatch.context() as patch:  # ended after the first of them
        patch.setattr(engines[1]._checkpoints.saver, "save", refused)
        with pytest.raises(CheckpointNotWritten):
            both.save(tmp_path)
    assert both.resume(tmp_path) == 1
    assert [engine.steps for engine in engines] == [0, 0]
    assert seen == {"batches": 1}


def test_launcher_is_told_of_the_file_that_a_resume_reads(
    solo: World, tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> str:
        found = progress.read(tmp_path, 0)
        assert found is not None
        return found.checkpoint

    def start_again() -> None:
        monkeypatch.setattr(solo, "progress", ProgressWriter(environ))
        assert named() == ""

    environ = {REPORTS_VARIABLE: str(tmp_path), RANK_VARIABLE: "0"}
    start_again()
    checkpoint = engines[0].save(tmp_path / "alone")
    assert named() == str(checkpoint)
    start_again()
    engines[0].load(str(checkpoint))  # as the Trainer resumes
    assert named() == str(checkpoint)
    start_again()
    both = sw.Engines(one=engines[0], other=engines[1])
    with monkeypatch.context() as patch:
        patch.setattr(several, "replace_file", full)
        with pytest.raises(CheckpointNotWritten):
            both.save(tmp_path)
    assert named() == ""
    both.save(tmp_path)
    assert named() == str(tmp_path / "together-1.json")
    start_again()
    sw.Engines(one=engines[0], other=engines[1]).resume(tmp_path)
    assert named() == str(tmp_path / "together-1.json")


def test_signal_during_the_first_save(solo: World, tmp_path: Path, engines: list[Engine]) -> None:
    """All are saved and joined before the process ends."""
    both = sw.Engines(one=engines[0], other=engines[1])
    step(engines[0])
    solo.preemption.agreed = signal.SIGTERM
    with pytest.raises(SystemExit):
        both.save(tmp_path)
    assert [path.name for path in tmp_path.glob("together-*")] == ["together-1.json"]
    assert told(tmp_path / "together-1.json")["steps"] == {"one": 1, "other": 0}
    assert both.resume(tmp_path) == 1


def test_training_continues_without_the_joint_file(
    tmp_path: Path,
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = sw.Engines(one=engines[0], other=engines[1])
    with monkeypatch.context() as patch:
        patch.setattr(several, "replace_file", full)
        with pytest.raises(CheckpointNotWritten, match=r"together-1.json was not written"):
            both.save(tmp_path)
        spec = engines[0]._spec
        settings = replace(spec.settings, save_failure="continue")
        saver = engines[0]._checkpoints.saver
        patch.setattr(saver, "_spec", replace(spec, settings=settings))
        assert both.save(tmp_path) is None
    assert "No space left on device. Training continues." in capsys.readouterr().err
    assert both.saves == 0
    assert both.save(tmp_path) == tmp_path / "together-1.json"


def test_resume_restores_which_engine_stepped_last(
    solo: World, tmp_path: Path, engines: list[Engine]
) -> None:
    both = sw.Engines(one=engines[0], other=engines[1])
    step(engines[0])
    both.save(tmp_path)
    solo.last_stepped_engine = -1
    both.resume(tmp_path)
    both.save(tmp_path / "copy")
    assert told(tmp_path / "copy" / "together-2.json")["last"] == "one"


def test_a_save_elsewhere_is_joined_there(
    solo: World, tmp_path: Path, engines: list[Engine]
) -> None:
    """After a signal, all are saved in the folder they resumed from."""
    both = sw.Engines(one=engines[0], other=engines[1])
    both.resume(tmp_path / "home")
    both.save(tmp_path / "copy")
    solo.preemption.asked = signal.SIGTERM
    step(engines[0])
    with pytest.raises(SystemExit):
        step(engines[0])
    assert [path.name for path in (tmp_path / "copy").glob("together-*")] == ["together-1.json"]
    assert both.resume(tmp_path / "home") == 2
    assert engines[0].steps == 1
