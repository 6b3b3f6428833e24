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
    flags = ("-n", "1,2,3", "--kind", "both", "--warmup", "2", "--out", "out")
    ran = shardwise.run("scale", *flags, script("measured"), env=QUICK)
    assert ran.code == 1, ran.err
    assert "three are too many" in ran.out
    out = shardwise.folder / "out"
    found = json.loads((out / "scaling.json").read_text())["results"]
    told = {(each["kind"], each["workers"]): each for each in found}
    assert list(told) == [(kind, n) for kind in ("strong", "weak") for n in (1, 2, 3)]
    for kind in ("strong", "weak"):
        assert "ValueError: three are too many" in told[kind, 3]["error"]
        for workers in (1, 2):
            assert told[kind, workers]["samples_per_second"] > 0
            assert told[kind, workers]["error"] is None
    assert [told[kind, 2]["batch"] for kind in ("strong", "weak")] == [12, 24]
    assert [told[kind, 2]["steps"] for kind in ("strong", "weak")] == [24, 12]
    # The same total batch has the same losses on any number of workers; the recorder sees them.
    losses = [told["strong", workers]["loss_by_epoch"] for workers in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert set(told["strong", 2]["means_by_epoch"]) == {"evaluation accuracy"}
    names = {path.name for path in out.iterdir()}
    assert {"scaling.html", "scaling.csv", "throughput.pdf", "efficiency.png"} <= names


def test_steps_bound_a_run(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--warmup", "1", "--steps", "3", "--zero", "1", "--out", "out")
    ran = shardwise.run("scale", *flags, script("measured"), env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    found = json.loads((shardwise.folder / "out" / "scaling.json").read_text())
    assert found["results"][0]["steps"] == 4
    assert "ZERO_1" in (shardwise.folder / "out/runs/strong-2/output.txt").read_text()


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
