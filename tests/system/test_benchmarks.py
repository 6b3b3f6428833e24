"""The benchmarks as a user runs them, at a size that says nothing about speed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--width", "32", "--layers", "2", "--vocabulary", "64", "--sequence", "8", "--batch", "4"]


def run(command: str, *arguments: str, code: int = 0) -> str:
    """What `python benchmarks/COMMAND ARGUMENTS` writes; it must end with `code`."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("figures")


def test_contenders_do_the_same_work(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    once = ["--config", "A", "--ranks", "2", "--rounds", "1", "--steps", "1"]
    shown = run(
        "step_time.py", *TINY, *once, "--rows", "0,2", "--peers", "ddp", "--json", str(path)
    )

    written = json.loads(path.read_text())
    (result,) = written["results"]
    by_key = {line["key"]: line for line in result["contenders"]}
    assert list(by_key) == ["plain", "ddp", "shardwise-0", "shardwise-2"]
    for key, line in by_key.items():
        assert line["note"] == ""
        assert line["losses"] == pytest.approx(by_key["plain"]["losses"], abs=5e-5), key
        assert line["median_ms"] > 0
        assert line["label"] in shown
    assert len(by_key["plain"]["losses"]) > 1
    assert by_key["ddp"]["over_ddp"] == 1.0
    assert result["limit_ms"] == pytest.approx(
        by_key["plain"]["median_ms"] / min(2, result["cores"])
    )
    assert written["machine"]["command"].startswith("python benchmarks/step_time.py --width 32")
    assert "| Shardwise ZERO_2 |" in run("markdown.py", str(path))


def test_primitives() -> None:
    shown = run("collectives.py", "--ranks", "2", "--mb", "1", "--repeats", "2")
    for name in ("reduce_scatter_single", "isend/irecv", "Gloo.reduce_scatter", "Gloo.barrier"):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "horovod"], "No such peer: horovod. There are ddp, zro"),
        (["--config", "B"], "No such configuration: B. There are A, C."),
        (["--ranks", "3"], "A batch of 8 rows cannot be cut into 3 equal shares"),
        (["--width", "100", "--heads", "3"], "A width of 100 cannot be cut into 3 equal heads"),
        (["--rounds", "0"], "0 is below 1"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], said: str) -> None:
    assert said in " ".join(run("step_time.py", *arguments, code=2).split())


def test_a_step_ends_with_its_last_rank(figures: ModuleType) -> None:
    ms = 1_000_000
    ends = [[10 * ms, 20 * ms, 50 * ms], [12 * ms, 25 * ms, 40 * ms]]
    assert figures.step_times(ends) == [13.0, 25.0]


@pytest.mark.parametrize(
    ("ranks", "cores", "part"), [(1, 2, 1.0), (2, 2, 0.5), (4, 2, 0.5), (2, 8, 0.5), (8, 8, 0.125)]
)
def test_the_limit(figures: ModuleType, ranks: int, cores: int, part: float) -> None:
    assert figures.limit_scale(ranks, cores) == part


def test_a_ratio_is_taken_within_its_round(figures: ModuleType) -> None:
    slow_in_round_two = figures.Line("a", "a", rounds=[[20.0], [400.0], [20.0]])
    ddp = figures.Line("ddp", "ddp", rounds=[[10.0], [200.0], [10.0]])
    assert figures.ratio(slow_in_round_two, ddp) == 2.0
    assert figures.ratio(slow_in_round_two, ddp, 0.5) == 4.0
    assert figures.ratio(slow_in_round_two, None) is None


def test_a_contender_that_trains_something_else_shows(figures: ModuleType) -> None:
    lines = [figures.Line("a", "a", losses=[4.0, 3.9]), figures.Line("b", "b", losses=[4.0, 3.8])]
    assert figures.disagreement(lines) == pytest.approx(0.1)
    assert figures.disagreement(lines[:1]) == 0.0
