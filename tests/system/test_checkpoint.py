"""Checkpoints of complete runs, started as a user does."""

from pathlib import Path

import pytest

from shardwise.checkpoint.tools import OpenedCheckpoint
from tests.system.launcher import SCRIPTS, Launcher


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize("disk", ["", "full"])
def test_a_save_in_the_background_outlasts_the_script(
    shardwise: Launcher, tmp_path: Path, disk: str
) -> None:
    folder = tmp_path / "checkpoints"
    words = [str(SCRIPTS / "saves.py"), str(folder), *disk.split()]
    ran = shardwise.run("run", "-n", "2", *words)
    if disk:
        assert ran.code != 0
        assert "Rank 1: The checkpoint of step 1 was not written: No space left on" in ran.err
        assert not (folder / "step-1").exists()
        return
    assert ran.code == 0, ran.err
    with OpenedCheckpoint(folder) as opened:
        assert opened.fields["step"] == 1
        assert all(good for _, good in opened.verify_tensors())
