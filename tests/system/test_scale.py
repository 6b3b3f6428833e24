"""`shardwise scale` as a user types it, on a script that knows nothing of it."""

import json
import signal
import sys
import time

import pytest

from tests.system.launcher import Launcher, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

QUICK = {"OMP_NUM_THREADS": "1"}


def test_every_size_is_measured_and_a_crash_is_said(shardwise: Launcher) -> None:
    flags = ("-n", "1,2,3", "--warmup", "2", "--out", "out")
    ran = shardwise.run("scale", *flags, script("measured"), env=QUICK)
    assert ran.code == 1, ran.err
    assert "three are too many" in ran.out
    out = shardwise.folder / "out"
    one, two, three = json.loads((out / "scaling.json").read_text())["results"]
    assert [each["workers"] for each in (one, two, three)] == [1, 2, 3]
    assert "ValueError: three are too many" in three["error"]
    for each in (one, two):
        assert each["error"] is None
        assert each["samples_per_second"] > 0
        assert (each["batch"], each["steps"]) == (12, 24)
        assert list(each["means_by_epoch"]) == ["evaluation accuracy"]
    # The same total batch has the same losses on any number of workers; the recorder sees them.
    assert len(one["loss_by_epoch"]) == 3
    assert two["loss_by_epoch"] == pytest.approx(one["loss_by_epoch"], rel=1e-4)
    names = {path.name for path in out.iterdir()}
    assert {"scaling.html", "scaling.csv", "throughput.pdf", "efficiency.png"} <= names


def test_weak_scaling_of_a_few_steps_with_settings_of_the_run(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--kind", "weak", "--warmup", "1", "--steps", "3", "--zero", "1")
    ran = shardwise.run("scale", *flags, "--out", "out", script("measured"), env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    (found,) = json.loads((shardwise.folder / "out" / "scaling.json").read_text())["results"]
    assert (found["kind"], found["batch"], found["steps"]) == ("weak", 24, 4)
    assert "ZERO_1" in (shardwise.folder / "out/runs/weak-2/output.txt").read_text()


def test_asked_to_end_it_leaves_nothing_behind(shardwise: Launcher) -> None:
    process = shardwise.start(
        "scale", "-n", "2", "--out", "out", script("measured"), "linger", env=QUICK
    )
    output = shardwise.folder / "out/runs/strong-2/output.txt"
    until = time.monotonic() + 60
    while not (output.exists() and output.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert shardwise.finish(process, 60).code == 128 + signal.SIGTERM
