"""`shardwise scale` as a user types it, on an ordinary script."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from shardwise.tools.scale import runs
from shardwise.tools.scale.runs import ScalingPlan
from tests.system.launcher import Launcher, script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_programs"),
]

QUICK = {"OMP_NUM_THREADS": "1"}


def test_measures_every_size_and_reports_a_crash(shardwise: Launcher) -> None:
    flags = ("-n", "1,2", "--warmup", "2", "--out", "out")
    ran = shardwise.run("scale", *flags, script("measured"), "not-on-1", env=QUICK)
    assert ran.code == 1, ran.err
    assert "that many will not do" in ran.out
    out = shardwise.folder / "out"
    one, two = json.loads((out / "scaling.json").read_text())["results"]
    assert one["error"] == "exit code 1: ValueError: that many will not do"
    assert two["error"] is None
    assert two["samples_per_second"] > 0
    assert (two["workers"], two["batch"], two["steps"]) == (2, 12, 24)
    assert list(two["means_by_epoch"]) == ["evaluation accuracy"]
    losses = list(two["loss_by_epoch"].values())
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    names = {path.name for path in out.iterdir()}
    assert {"scaling.html", "scaling.csv", "throughput.pdf", "efficiency.png"} <= names


def test_weak_scaling_of_a_few_steps_with_settings_of_the_run(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--kind", "weak", "--warmup", "1", "--steps", "3", "--zero", "1")
    name = os.fsdecode(b"caf\xe9.py")  # a name that is not UTF-8
    shutil.copy(script("measured"), shardwise.folder / name)
    ran = shardwise.run("scale", *flags, name, env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    out = shardwise.folder / "runs" / r"scale-caf\udce9"
    (found,) = json.loads((out / "scaling.json").read_text())["results"]
    assert (found["kind"], found["batch"], found["steps"]) == ("weak", 24, 4)
    assert "ZERO_1" in (out / "runs/weak-2/output.txt").read_text()


SETTLED = """\
import shardwise as sw
world = sw.init(quiet=True)
print(world.settings.batch)
"""


@pytest.mark.parametrize(("kind", "batch"), [("strong", "total"), ("weak", "worker")])
def test_kind_overrides_the_batch_setting(
    kind: str, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settled.py"
    path.write_text(SETTLED)
    monkeypatch.setenv("SHARDWISE_BATCH", "worker" if kind == "strong" else "total")
    plan = ScalingPlan(
        words=(str(path),),
        flags=(),
        sizes=(1, 2),
        kinds=(kind,),
        warmup=5,
        steps=None,
        out=tmp_path,
    )
    ended = runs.run(plan, kind, 1, lambda steps: None)
    assert ended.log.read_text().splitlines()[-1] == batch


def test_neither_reads_nor_writes_checkpoints(shardwise: Launcher) -> None:
    """Otherwise it would overwrite the user's, and a size would resume from the one before."""
    words = (script("resumes"), "checkpoints", "--every", "2")
    assert shardwise.run("run", "-n", "1", *words, env=QUICK).code == 0
    saved = sorted((shardwise.folder / "checkpoints").rglob("*"))
    flags = ("-n", "1,2", "--warmup", "1", "--out", "out")
    ran = shardwise.run("scale", *flags, *words, env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    found = json.loads((shardwise.folder / "out" / "scaling.json").read_text())["results"]
    assert [each["steps"] for each in found] == [15, 15]
    assert sorted((shardwise.folder / "checkpoints").rglob("*")) == saved
    assert "start 0" in (shardwise.folder / "out/runs/strong-2/output.txt").read_text()


def test_measures_a_horovod_script(shardwise: Launcher) -> None:
    flags = ("-n", "2", "--kind", "weak", "--warmup", "1", "--steps", "5", "--out", "out")
    ran = shardwise.run("scale", *flags, script("horovod_measured"), env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    (found,) = json.loads((shardwise.folder / "out" / "scaling.json").read_text())["results"]
    assert (found["batch"], found["steps"], found["error"]) == (2 * 4, 6, None)
    assert found["samples_per_second"] > 0


def test_sigterm_leaves_no_process(shardwise: Launcher) -> None:
    process = shardwise.start(
        "scale", "-n", "2", "--out", "out", script("measured"), "linger", env=QUICK
    )
    output = shardwise.folder / "out/runs/strong-2/output.txt"
    until = time.monotonic() + 60
    while not (output.exists() and output.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert shardwise.finish(process, 60).code == 128 + signal.SIGTERM
