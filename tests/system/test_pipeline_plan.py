"""`shardwise pipeline-plan`, and a pipeline-parallel run with the flags that it recommends."""

import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.tools.pipeline_plan import command
from tests.system.launcher import Launcher, script
from tests.system.test_launchers import EXAMPLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_programs"),
]

QUICK = {"OMP_NUM_THREADS": "1"}
MODEL = [
    *("--width", "32", "--layers", "4", "--heads", "2", "--context", "16", "--vocabulary", "256"),
    *("--batch-size", "8", "--steps", "6", "--evaluate-every", "6", "--held-out", "8"),
    *("--sample", "4", "--data", str(Path(json.__file__).parent)),
]


def test_shows_stages_and_the_recommended_command_runs(shardwise: Launcher) -> None:
    """The losses equal one worker's."""
    example = str(EXAMPLES / "language_model.py")
    shown = shardwise.run("pipeline-plan", "--pipeline", "2", example, *MODEL, env=QUICK)
    assert shown.code == 0, shown.out + shown.err
    assert "2 stages, balanced in time" in shown.out
    assert "zero-bubble" in shown.out
    advised = r"shardwise run (-n 2 --pipeline 2 --stages \S+ --microbatches \d+)"
    (line,) = re.findall(advised, shown.out)
    losses = {}
    for name, flags in (("two", line.split()), ("one", ["-n", "1"])):
        ran = shardwise.run("run", *flags, example, *MODEL, "--out", name, env=QUICK)
        assert ran.code == 0, ran.out + ran.err
        assert ("2 stages (1f1b): 0: embedding" in ran.out) == (name == "two")
        lines = (shardwise.folder / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [float(x) for line in lines for x in re.findall(r'loss": ([0-9.]+)', line)]
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    assert len(losses["one"]) >= 6


def test_shows_whole_layer_names_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.language_model.layers."
    layers = [
        command.TimedLayer(f"{name}{n}", 1_234_567, 0.01, 0.02, 1e6, adds_parameters=True)
        for n in range(12)
    ]
    request = command.PipelinePlanRequest(("train.py",), (), 2, 8, 3, "time")
    for table in command.tables(layers, request):
        Console(width=80).print(table)
    out = capsys.readouterr().out
    assert "7,407,402" in out
    assert "sends kB" in out
    assert max(map(len, out.splitlines())) <= 80
    assert command.advice(layers, request)[:2] == [
        f"stage 0: {name}0 to {name}5",
        f"stage 1: {name}6 to {name}11",
    ]


@pytest.mark.full
def test_leaves_the_scripts_checkpoints_alone(shardwise: Launcher) -> None:
    words = (script("resumes"), "checkpoints", "--every")
    assert shardwise.run("run", "-n", "1", *words, "4", "--epochs", "1", env=QUICK).code == 0
    saved = sorted((shardwise.folder / "checkpoints").rglob("*"))
    ran = shardwise.run("pipeline-plan", "--pipeline", "2", "--steps", "4", *words, "1", env=QUICK)
    assert ran.code == 0, ran.out + ran.err
    assert sorted((shardwise.folder / "checkpoints").rglob("*")) == saved


def test_refuses_scripts_without_steps_or_layers(shardwise: Launcher) -> None:
    (shardwise.folder / "tests_bad.py").write_text("raise SystemExit(3)")
    ran = shardwise.run("pipeline-plan", "--pipeline", "2", "tests_bad.py", env=QUICK)
    assert ran.code != 0
    assert "failed (exit code 3), so there are no layers to divide into stages" in ran.err
    words = ["pipeline-plan", "--pipeline", "9", "--steps", "1", script("parts")]
    ran = shardwise.run(*words, env=QUICK)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "fewer than 9 stages" in ran.err


def test_old_command_name_works_and_prints_the_new_one(shardwise: Launcher) -> None:
    ran = shardwise.run("split", "--pipeline", "2", env=QUICK)
    assert ran.code == 2
    assert "`shardwise split` is now called `shardwise pipeline-plan`." in ran.err
    assert "No script given. Example: shardwise pipeline-plan" in ran.err
    shown = shardwise.run("--help", env=QUICK)
    assert "pipeline-plan" in shown.out
    assert "split" not in shown.out
