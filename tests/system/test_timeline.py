"""`shardwise run --timeline` and `shardwise timeline`, as a user types them."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.launcher import Launcher, script


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@pytest.mark.usefixtures("warm_programs")
def test_names_the_rank_that_sleeps(shardwise: Launcher, tmp_path: Path) -> None:
    ran = shardwise.run("run", "-n", "2", "--timeline", "t.json", script("timed"), "20", "0.03")
    assert ran.code == 0, ran.err
    assert "timeline in t.json" in ran.err
    said = shardwise.run("timeline", "t.json", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    slowest = found["slowest"]
    assert (slowest["rank"], slowest["kind"]) == (1, "other")
    assert 0.02 < slowest["more"] < 0.1
    assert slowest["times"] >= 15
    waiting = found["ranks"][0]
    assert waiting["waited"] > 0.02
    assert waiting["exposed"] >= waiting["waited"]
    shown = shardwise.run("timeline", "t.json").out
    assert "rank 1 is slowest: " in shown
    assert " exposed  ms, communicating while doing nothing else\n" in shown
    assert "in the script's own code" in shown


def test_killed_run_leaves_a_timeline(shardwise: Launcher, tmp_path: Path) -> None:
    """Kill the launcher and all ranks with kill -9 during the run."""
    path = tmp_path / "t.json"
    started = shardwise.start(
        *("run", "-n", "2", script("timed"), "0", "0"), env={"HOROVOD_TIMELINE": "t.json"}
    )
    assert started.stdout is not None
    for line in started.stdout:
        if "trained" in line:
            break
    time.sleep(0.7)
    shardwise.kill_all()
    shardwise.finish(started)
    for folder in shardwise.folders_left():  # the process that would remove it was killed as well
        shutil.rmtree(folder)
    found = events(path)
    for rank in range(2):
        names = {event["name"] for event in found if event["pid"] == rank}
        assert {"forward", "backward", "update", "step 40"} <= names
    said = shardwise.run("timeline", "t.json")
    assert said.code == 0, said.err
    assert "Milliseconds per step" in said.out


@pytest.mark.usefixtures("warm_programs")
def test_refuses_paths_that_cannot_be_written(shardwise: Launcher) -> None:
    ran = shardwise.run("run", "-n", "1", "--timeline", "no/t.json", script("timed"), "1", "0")
    assert ran.code != 0
    assert "The timeline no/t.json cannot be written: No such file or directory." in ran.err
    said = shardwise.run("timeline", "t.json")
    assert said.code == 2
    assert said.err == (
        "shardwise: The timeline t.json cannot be read: No such file or directory.\n"
    )
