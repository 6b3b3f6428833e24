"""examples/language_model.py as a newcomer starts it: alone, on two workers, by torchrun."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("warm_programs")

SCRIPT = Path(__file__).parents[2] / "examples" / "language_model.py"
DATA = Path(sysconfig.get_path("stdlib")) / "json"
STEPS = 20
SMALL = (
    f"--layers 2 --width 64 --context 64 --vocabulary 512 --steps {STEPS} --batch-size 7 "
    f"--held-out 15 --evaluate-every 10 --sample 8 --data {DATA}"
).split()

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "alone": [sys.executable],
    "two": [str(BIN / "shardwise"), "run", "-n", "2", "--zero", "2"],
    "micro": [str(BIN / "shardwise"), "run", "-n", "2", "--zero", "1", "--micro-batch-size", "2"],
    "context": [str(BIN / "shardwise"), "run", "-n", "2", "--context", "2"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
}


@dataclass
class Run:
    """What one run printed and left behind."""

    code: int
    screen: str
    errors: str
    out: Path

    def column(self, name: str) -> list[float]:
        rows = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [row[name] for row in rows if name in row]


def start(launcher: str, out: Path, *flags: str) -> Run:
    # Threads of several processes on few cores only wait for each other.
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(SCRIPT), *SMALL, "--out", str(out), *flags],
        cwd=out.parent,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Run(done.returncode, done.stdout, done.stderr, out)


OFTEN = [
    *("alone", "two", "context"),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("torchrun", "micro")),
]


class Runs(dict[str, Run]):
    """A run by each launcher, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, launcher: str) -> Run:
        run = self[launcher] = start(launcher, self._folder / launcher)
        assert run.code == 0, run.screen + run.errors
        return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(params=OFTEN)
def run(request: pytest.FixtureRequest, runs: Runs) -> Run:
    return runs[request.param]


@pytest.mark.parametrize("launcher", OFTEN[1:])
def test_all_numbers_of_workers_give_the_same_losses(runs: Runs, launcher: str) -> None:
    for name in ("train/loss", "train/grad_norm", "held_out/loss", "held_out/bits_per_byte"):
        expected = runs["alone"].column(name)
        assert runs[launcher].column(name) == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_every_step_is_kept_and_perplexity_falls(run: Run) -> None:
    losses = run.column("train/loss")
    assert len(losses) == STEPS
    assert all(math.isfinite(value) for value in losses)
    perplexities = run.column("held_out/perplexity")
    assert len(perplexities) == 3
    assert perplexities[-1] < 0.8 * perplexities[0]


def test_the_model_loads_into_plain_pytorch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from helpers import gpt

    tensors = load_file(run.out / "model.safetensors")
    shape = gpt.Shape(vocabulary=512, context=64, layers=2, width=64, heads=4)
    gpt.GPT(shape).load_state_dict(tensors)


def test_the_plot_and_the_events_are_there(run: Run) -> None:
    start = (run.out / "loss.png").read_bytes()[:24]
    assert start.startswith(b"\x89PNG")
    assert struct.unpack(">II", start[16:]) >= (1000, 800)
    assert len(list((run.out / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_the_main_rank_alone_shows_sample_and_table(run: Run) -> None:
    for word in (
        "the model writes",
        "placement",
        "tokens/s",
        "resident set",
        "held-out perplexity",
    ):
        assert run.screen.count(word) == 1
    assert "model.safetensors" in run.screen
    assert "[1]" not in run.screen


def test_the_time_limit_stops_all_ranks_and_files_of_an_earlier_run_are_replaced(
    runs: Runs, tmp_path: Path
) -> None:
    shutil.copytree(runs["two"].out, tmp_path / "out")
    run = start("two", tmp_path / "out", "--minutes", "0.0001")
    assert run.code == 0, run.errors
    assert f"stopped at step 1 of {STEPS}" in run.screen
    assert len(run.column("train/loss")) == 1
    assert len(list((run.out / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize(
    ("launcher", "flags", "complaint"),
    [
        ("two", ["--data", "no/such/folder"], "no/such/folder"),
        ("two", ["--context", "100000"], "a smaller --context"),
        ("alone", ["--width", "65"], "--width 65"),
        ("alone", ["--steps", "0"], "above 0"),
    ],
)
def test_bad_flags_are_explained_without_a_traceback(
    tmp_path: Path, launcher: str, flags: list[str], complaint: str
) -> None:
    run = start(launcher, tmp_path / "out", *flags)
    assert run.code != 0
    assert complaint in run.errors
    assert "[1]" not in run.screen + run.errors
    assert "Traceback" not in run.errors
