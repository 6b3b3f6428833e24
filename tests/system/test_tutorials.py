"""The examples of the tutorials, small, as a reader starts them."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.components import need

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_programs"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error::UserWarning",
    "COLUMNS": "100",
    # root may start Open MPI in a container, and more ranks than there are cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def start(*words: str, folder: Path) -> str:
    """Run a command in `folder` and return its output."""
    ran = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | SETTINGS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def example(name: str, *flags: str, folder: Path) -> str:
    return start(sys.executable, str(EXAMPLES / name), *flags, folder=folder)


def run(workers: int, name: str, *flags: str, folder: Path, settings: tuple[str, ...] = ()) -> Any:
    """Run an example on `workers` workers, and return the contents of its --result."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "shardwise", "run", "-n", str(workers), *settings]
    words = [*command, str(EXAMPLES / name), *flags, "--result", str(result)]
    start(*words, folder=folder)
    return json.loads(result.read_text())


class TestPi:
    POINTS = ("--points", "420001")

    @pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 4, 8), marks=pytest.mark.full)])
    def test_the_count_is_the_same_for_any_number_of_ranks(
        self, tmp_path: Path, sizes: tuple[int, ...]
    ) -> None:
        counts = {n: run(n, "pi.py", *self.POINTS, folder=tmp_path) for n in (1, *sizes)}
        assert {found["inside"] for found in counts.values()} == {counts[1]["inside"]}
        assert counts[1]["pi"] == pytest.approx(3.14159, abs=1e-2)
        other = run(1, "pi.py", *self.POINTS, "--seed", "1", folder=tmp_path)
        assert other["inside"] != counts[1]["inside"], "points are drawn"

    def test_five_million_points_are_near_pi(self, tmp_path: Path) -> None:
        assert run(2, "pi.py", folder=tmp_path)["pi"] == pytest.approx(3.14159265, abs=2.9e-3)

    @pytest.mark.parametrize(
        "component", ["openmpi", pytest.param("mpich", marks=pytest.mark.full)]
    )
    def test_by_mpirun_and_as_a_table(self, tmp_path: Path, component: str) -> None:
        mpirun = f"mpirun.{component}"
        need(component, None if shutil.which(mpirun) else f"{mpirun} is not installed")
        words = [mpirun, "-n", "2", sys.executable, str(EXAMPLES / "pi.py"), *self.POINTS]
        said = start(*words, folder=tmp_path)
        screen = example("pi.py", "--workers", "1,2", *self.POINTS, folder=tmp_path)
        (count,) = re.findall(r"inside ([\d,]+) of", said)
        assert screen.count(f"inside {count} of 420,001") == 2
        assert "8.03" in screen
        assert "published pi" in screen


@pytest.mark.full
def test_experts_give_the_same_losses_on_two_workers(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a.py", "b.py", "c.py"):
        shutil.copy(EXAMPLES / "helpers" / "gpt.py", text / name)
    flags = ("--data", str(text), "--steps", "6", "--layers", "2", "--width", "32")
    small = (*flags, "--vocabulary", "300", "--context", "16", "--held-out", "16")
    place = tmp_path / "runs" / "moe"

    def recorded(name: str) -> list[float]:
        lines = (place / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)[name] for line in lines]

    example("moe.py", *small, folder=tmp_path)
    losses, entropies = recorded("train/loss"), recorded("train/blocks.1.moe/entropy")
    command = [sys.executable, "-m", "shardwise", "run", "-n", "2", "--expert", "2", "--zero", "2"]
    start(*command, str(EXAMPLES / "moe.py"), *small, folder=tmp_path)
    assert len(losses) == 6
    assert recorded("train/loss") == pytest.approx(losses, abs=2e-4)
    # Tokens near a tie may use another expert after rounding.
    assert recorded("train/blocks.1.moe/entropy") == pytest.approx(entropies, abs=0.02)
    assert (place / "usage.png").exists()


@pytest.mark.full
def test_digits_at_two_sizes_write_all_plots(tmp_path: Path) -> None:
    screen = example("mnist.py", "--workers", "1,2", "--epochs", "3", folder=tmp_path)
    alone, two = screen.split("== 2 workers")
    assert "in 3 epochs. It is shortened to 1.5: write more --epochs" in two
    assert "shortened" not in alone
    out = tmp_path / "runs" / "mnist"
    for name in ("accuracy_1.pdf", "accuracy_2.pdf", "warmup.pdf"):
        data = (out / name).read_bytes()
        assert data.startswith(b"%PDF")
        assert b"%%EOF" in data[-8:]
    assert "no warm-up" in screen


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_digits_reach_95_percent_at_every_size(tmp_path: Path, workers: int) -> None:
    found = run(workers, "mnist.py", folder=tmp_path)
    curves = found["curves"]
    assert found["batch"] == 32 * workers
    for way in curves.values():
        assert len(way["training"]) == len(way["validation"]) == 16
    assert curves["warm-up"]["validation"][-1] >= 0.95


PTB = "TESTS_PTB"
"""Names the folder of real text in the form of the Penn Treebank that these tests read."""


class TestPtb:
    def losses(self, workers: int, folder: Path) -> list[float]:
        """The losses of the first 40 steps on real text."""
        record = folder / str(workers)
        settings = ("--stop-after", "40", "--record", str(record))
        command = [sys.executable, "-m", "shardwise", "run", "-n", str(workers), *settings]
        words = [*command, str(EXAMPLES / "ptb.py"), "--data", os.environ[PTB], "--double"]
        start(*words, folder=folder)
        rows = map(json.loads, (record / "rank-0.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows]

    @pytest.mark.skipif(PTB not in os.environ, reason=f"{PTB} names no folder of text")
    def test_the_first_losses_are_those_of_one_worker(self, tmp_path: Path) -> None:
        """Runs at full size.

        Differences in the last bit of fp32 have grown to 0.7 % at this point.
        """
        alone = self.losses(1, tmp_path)
        assert len(alone) == 40
        assert alone[-1] < 0.9 * alone[0]
        for workers in (2, 4):
            assert self.losses(workers, tmp_path) == pytest.approx(alone, rel=1e-8)

    @pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 4), marks=pytest.mark.full)])
    def test_the_exact_mode_has_the_bits_of_one_worker(
        self, tmp_path: Path, sizes: tuple[int, ...]
    ) -> None:
        """Covers the complete run, including dropout and evaluations. Lanes are cached."""
        write_text(tmp_path, (400, 100, 100))
        flags = ("--data", str(tmp_path), "--config", "medium", "--hidden", "24", "--epochs", "2")
        runs = [
            run(workers, "ptb.py", *flags, folder=tmp_path, settings=("--exact", "4"))
            for workers in (1, *sizes)
        ]
        seconds = [found.pop("seconds") for found in runs]
        assert all(found == runs[0] for found in runs[1:])
        assert len(seconds[0]) == 2
        assert runs[0]["validation"][1] < runs[0]["validation"][0]

    def test_text_that_is_not_there_is_said(self, tmp_path: Path) -> None:
        words = [sys.executable, str(EXAMPLES / "ptb.py"), "--data", str(tmp_path)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2
        assert "has no ptb.train.txt or train.txt" in ran.stderr
        assert "Traceback" not in ran.stderr


def write_text(folder: Path, lines_of_each: tuple[int, int, int]) -> None:
    """The source of two of Python's modules, in three files."""
    import argparse
    import inspect
    import textwrap

    lines = inspect.getsource(textwrap).splitlines() + inspect.getsource(argparse).splitlines()
    rest = iter(lines)
    for part, count in zip(("train", "valid", "test"), lines_of_each, strict=True):
        (folder / f"ptb.{part}.txt").write_text("\n".join(itertools.islice(rest, count)))


class TestResNet:
    SMALL = ("--num-steps", "2", "--batch-size", "2", "--crop", "32")

    @pytest.mark.full  # as the table of test_digits_at_two_sizes_write_all_plots
    def test_the_table_has_the_rate_of_all_workers(self, tmp_path: Path) -> None:
        screen = example("resnet.py", "--workers", "1,2", *self.SMALL, folder=tmp_path)
        assert "2 images of 32 x 32 per worker" in screen
        assert "281.2" in screen

    def test_a_folder_of_images(self, tmp_path: Path) -> None:
        from PIL import Image

        for name, color in (("cats", (200, 0, 0)), ("dogs", (0, 0, 200))):
            (tmp_path / name).mkdir()
            Image.new("RGB", (40, 50), color).save(tmp_path / name / "1.png")
        data = ("--data", str(tmp_path))
        assert run(1, "resnet.py", *self.SMALL, *data, folder=tmp_path)["rate"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("ptb.py", "--data", "."),
        *(pytest.param((name,), marks=pytest.mark.full) for name in ("mnist.py", "resnet.py")),
    ],
    ids=str,
)
def test_batches_of_each_worker_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / words[0]), *words[1:]],
        cwd=tmp_path,
        env=os.environ | SETTINGS | {"SHARDWISE_BATCH": "worker"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2, ran.stderr
    assert "Leave --batch worker out" in ran.stderr


@pytest.mark.full
def test_ways_to_make_islands_equal_are_drawn(tmp_path: Path) -> None:
    data = str(Path(json.__file__).parent)
    small = ("--layers", "1", "--width", "32", "--context", "16", "--batch-size", "4")
    some = ("--vocabulary", "300", "--tokens", "5760", "--held-out", "8", "--data", data)
    screen = example("diloco.py", *small, *some, "--evaluations", "3", folder=tmp_path)
    out = tmp_path / "runs" / "diloco"
    found = json.loads((out / "curves.json").read_text())
    assert (out / "bytes_and_seconds.png").read_bytes().startswith(b"\x89PNG")
    for way, result in found.items():
        assert way in screen
        assert result["curve"][-1]["loss"] < math.log(300), "it has learned"
    sent = [result["curve"][-1]["bytes"] for result in found.values()]
    parameters = next(iter(found.values()))["parameters"]
    assert sent[:2] == [90 * 4 * parameters, 3 * 4 * parameters]
    assert sent == sorted(sent, reverse=True)


@pytest.mark.full
def test_steps_behind_are_drawn(tmp_path: Path) -> None:
    data = str(Path(json.__file__).parent)
    small = ("--layers", "1", "--width", "32", "--context", "16", "--batch-size", "4")
    some = ("--vocabulary", "300", "--tokens", "3840", "--held-out", "8", "--data", data)
    screen = example("parameter_server.py", *small, *some, "--evaluations", "3", folder=tmp_path)
    out = tmp_path / "runs" / "parameter_server"
    found = json.loads((out / "curves.json").read_text())
    assert (out / "loss_and_waiting.png").read_bytes().startswith(b"\x89PNG")
    assert "largest staleness" in screen
    assert {behind: result["staleness"] for behind, result in found.items()} == {
        "0": 0, "1": 1, "3": 3
    }  # fmt: skip
    for result in found.values():
        assert result["steps"] == 60
        assert result["waiting"] >= 0
        assert result["curve"][-1]["loss"] < math.log(300), "it has learned"
