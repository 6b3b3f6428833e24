"""Checkpoints of whole runs, as a user starts them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.tools import Opened
from tests.system.launcher import SCRIPTS, Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher; nothing may be left of its runs when the test ends."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.wait_until_gone()
    launcher.kill_all()
    assert left == []


@pytest.mark.parametrize("disk", ["", "full"])
def test_a_save_in_the_background_outlasts_the_script(
    launcher: Launcher, tmp_path: Path, disk: str
) -> None:
    folder = tmp_path / "checkpoints"
    words = [str(SCRIPTS / "saves.py"), str(folder), *disk.split()]
    ran = launcher.run("run", "-n", "2", *words)
    if disk:
        assert ran.code != 0
        assert "Rank 1: The checkpoint of step 1 was not written: No space left on" in ran.err
        assert not (folder / "step-1").exists()
        return
    assert ran.code == 0, ran.err
    with Opened(folder) as opened:
        assert opened.fields["step"] == 1
        assert all(good for _, good in opened.checked())
