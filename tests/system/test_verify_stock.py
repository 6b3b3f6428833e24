"""`shardwise verify --stock` names the mistake of a script with DistributedDataParallel."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.system.launcher import Launcher, Ran, script

SCRIPT = script("stock_mistakes")
CORRECT = {"none": 3}
MISTAKES = {
    "summed": "gradients summed",
    "twice": "gradients averaged twice",
    "unreduced": "gradients not reduced",
    "module": "gradients not reduced",
    "initial_values": "initial values",
    "frozen": "frozen on some ranks",
    "same_data": "same data on every rank",
    "set_epoch": "sampler without set_epoch",
    "mean_of_means": "mean of means",
    "rate": "rate scaled by the number of ranks",
    "undivided": "accumulation not divided",
    "divided_twice": "accumulation divided twice",
    "short_window": "last short window",
    "local_norm": "clipping by a local norm",
    "scheduler": "scheduler stepped several times",
    "dropout": "same dropout on all ranks",
    "batch_norm": "BatchNorm with local statistics",
}
FAST = ("mean_of_means",)
"""Mistakes of `make test`. The others need more runs, and are in `make test-all`."""


def verify(shardwise: Launcher, folder: Path, *words: str) -> tuple[Ran, dict[str, object]]:
    """Run `shardwise verify` and return its end and its JSON."""
    ran = shardwise.run("verify", "--json", "found.json", *words)
    path = folder / "found.json"
    return ran, json.loads(path.read_text()) if path.exists() else {}


def test_correct_script_is_equal_within_rounding(shardwise: Launcher, tmp_path: Path) -> None:
    words = ("-n", "2", "--stock", "--accept", "rounding", "--junit", "junit.xml", SCRIPT, "none")
    ran, found = verify(shardwise, tmp_path, *words)
    assert ran.code == 0, ran.out + ran.err
    assert found["verdict"] == "rounding"
    assert found["causes"] == []
    assert found["rows"] == [16] * 11  # 8 rows on each of 2 ranks
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.attrib["tests"] == "1"
    assert suite.attrib["failures"] == "0"


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=[] if m in FAST else pytest.mark.full) for m in MISTAKES]
)
def test_names_the_mistake(shardwise: Launcher, tmp_path: Path, mistake: str) -> None:
    ran, found = verify(shardwise, tmp_path, "-n", "2", "--stock", SCRIPT, mistake)
    assert ran.code == 5, ran.out + ran.err
    causes = found["causes"]
    assert isinstance(causes, list)
    assert causes[0]["name"] == MISTAKES[mistake], causes


@pytest.mark.full
@pytest.mark.parametrize("library", ["fsdp1", "fsdp2", "zero", "tensor", "accelerate"])
def test_correct_script_of_a_library(shardwise: Launcher, tmp_path: Path, library: str) -> None:
    words = ("-n", "2", "--stock", "--accept", "rounding", script("stock_libraries"), library)
    ran, found = verify(shardwise, tmp_path, *words)
    assert ran.code == 0, ran.out + ran.err
    assert found["causes"] == []


@pytest.mark.full
def test_takes_a_whole_command(shardwise: Launcher, tmp_path: Path) -> None:
    command = f"torchrun --nproc-per-node 2 --master-port 0 {SCRIPT} twice"
    ran, found = verify(shardwise, tmp_path, "--stock", command)
    assert ran.code == 5, ran.out + ran.err
    assert found["ranks"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stock", "--zero", "3", SCRIPT), "--zero has no meaning"),
        (("--stock", "-n", "2", "torchrun x.py"), "Give -n for a script, or a whole command"),
        (("--junit", "a.xml", SCRIPT), "--junit needs --stock"),
        (("--stock", "--junit", "nowhere/a.xml", SCRIPT), "there is no folder nowhere"),
        (("--stock", "nothing-here --now"), "There is no program 'nothing-here'"),
    ],
)
def test_refuses_before_a_run(shardwise: Launcher, words: tuple[str, ...], message: str) -> None:
    ran = shardwise.run("verify", *words)
    assert ran.code in (1, 2)
    assert message in " ".join((ran.out + ran.err).split())


def test_command_without_ranks_is_an_error(shardwise: Launcher, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import torch\n")
    ran = shardwise.run("verify", "--stock", f"{sys.executable} alone.py")
    assert ran.code in (1, 2)
    assert "started no process that has a rank" in " ".join((ran.out + ran.err).split())


def test_script_without_a_step_is_an_error(shardwise: Launcher, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\n")
    ran = shardwise.run("verify", "-n", "2", "--stock", "idle.py")
    assert ran.code in (1, 2)
    assert "made no step of a torch optimizer" in " ".join((ran.out + ran.err).split())
