"""`shardwise verify --stock` names the mistake of a script with DistributedDataParallel."""

import json
import re
import signal
import sys
import time
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml

from shardwise.tools.verify.stock import stock_runs
from tests.system.launcher import Launcher, Ran, script

ROOT = Path(__file__).parents[2]
SCRIPT = script("stock_mistakes")
BY_HAND = script("stock_by_hand")
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


WARM = pytest.mark.usefixtures("warm_programs")
"""For tests of `make test`, whose commands and ranks are forks. The others start as a user's do."""


def verify(
    shardwise: Launcher, folder: Path, *words: str, limit: float = 240
) -> tuple[Ran, dict[str, object]]:
    """Run `shardwise verify` and return its end and its JSON."""
    started = shardwise.start("verify", "--json", "found.json", *words)
    ran = shardwise.finish(started, limit)
    path = folder / "found.json"
    return ran, json.loads(path.read_text()) if path.exists() else {}


@WARM
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


@WARM
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
@pytest.mark.parametrize(
    "library",
    [
        *("fsdp1", "fsdp1_flat", "fsdp2", "fsdp2_bf16"),
        *("zero", "tensor", "accelerate", "accelerate_fsdp2"),
    ],
)
def test_correct_script_of_a_library(shardwise: Launcher, tmp_path: Path, library: str) -> None:
    words = ("-n", "2", "--stock", "--accept", "rounding", script("stock_libraries"), library)
    ran, found = verify(shardwise, tmp_path, *words)
    assert ran.code == 0, ran.out + ran.err
    assert found["causes"] == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fabric"])
def test_correct_script_of_lightning(shardwise: Launcher, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("lightning", reason="the lightning package is not there")
    words = ("-n", "2", "--stock", "--accept", "rounding", script("stock_lightning"), kind)
    ran, found = verify(shardwise, tmp_path, *words)
    assert ran.code == 0, ran.out + ran.err
    assert found["causes"] == []


@pytest.mark.full
@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("summed_window_2", "gradients summed"),
        ("none", None),
        ("constant_batch", None),
        ("summed", "gradients summed"),
        ("mean_of_means", "mean of means"),
        ("divided_twice", "accumulation divided twice"),
        ("same_data", "same data on every rank"),
    ],
)
def test_script_of_deepspeed(
    shardwise: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    mistake: str,
    cause: str | None,
) -> None:
    pytest.importorskip("deepspeed", reason="the deepspeed package is not there")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ("-n", "2", "--stock", "--accept", "rounding", script("stock_deepspeed"), stage)
    ran, found = verify(shardwise, tmp_path, *words, mistake)
    assert ran.code == (5 if cause else 0), ran.out + ran.err
    causes = found["causes"]
    assert isinstance(causes, list)
    assert [each["name"] for each in causes][:1] == ([cause] if cause else [])


@pytest.mark.full
@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        # The backward pass of TRL's loss adds up gradients in fp32, a cast that verify undoes.
        ("none", None),
        ("summed", "gradients summed"),
        ("mean_of_means", "mean of means"),
        ("same_data", "same data on every rank"),
    ],
)
def test_script_of_trl(
    shardwise: Launcher, tmp_path: Path, mistake: str, cause: str | None
) -> None:
    pytest.importorskip("trl", reason="the trl package is not there")
    words = ("-n", "2", "--stock", "--accept", "rounding", script("stock_trl"), mistake)
    # A run imports for 10 s, and a cause that needs a trial needs eight runs.
    ran, found = verify(shardwise, tmp_path, *words, limit=600)
    assert ran.code == (5 if cause else 0), ran.out + ran.err
    causes = found["causes"]
    assert isinstance(causes, list)
    assert [each["name"] for each in causes][:1] == ([cause] if cause else [])


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((BY_HAND, "sliced"), 3, "Equal within rounding"),
        (("--total-batch", "16", BY_HAND, "counted"), 3, "was started with 16 (16 rows per step)"),
        (
            (BY_HAND, "counted"),
            4,
            "all ranks received 16 rows, and the models of one process 8",
        ),
        ((BY_HAND, "drawn"), 4, "all ranks received 16 rows, and the models of one process 8"),
        ((BY_HAND, "unseeded"), 4, "normal_ in stock_by_hand.py:26 draws random numbers (torch)"),
    ],
    ids=["sliced", "total batch", "counted", "drawn", "unseeded"],
)
def test_batches_made_by_hand(
    shardwise: Launcher, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    theirs = tmp_path / "last.pt"
    torch.save({"weight": torch.ones(1, 4), "bias": torch.ones(1)}, theirs)
    before = theirs.read_bytes()
    ran, _ = verify(shardwise, tmp_path, "-n", "2", "--stock", *words)
    assert ran.code == code, ran.out + ran.err
    assert said in " ".join(ran.out.split())
    # Both runs have loaded and saved a checkpoint of this name.
    assert theirs.read_bytes() == before
    assert shardwise.folders_left() == []
    assert (tmp_path / "runs" / "verify-stock_by_hand" / "verify.html").exists()


@pytest.mark.full
def test_script_that_spawns_its_ranks(shardwise: Launcher, tmp_path: Path) -> None:
    command = f"{sys.executable} {script('stock_spawns')}"
    ran, found = verify(shardwise, tmp_path, "--stock", "--accept", "rounding", command)
    assert ran.code == 0, ran.out + ran.err
    assert found["ranks"] == 2
    assert found["rows"] == [16, 16]


@pytest.mark.full
def test_hanging_script_is_stopped(shardwise: Launcher, tmp_path: Path) -> None:
    words = ("-n", "2", "--stock", "--time-limit", "25", "--junit", "junit.xml", BY_HAND, "hangs")
    ran, _ = verify(shardwise, tmp_path, *words)
    assert ran.code == 1
    said = " ".join(ran.out.split())
    assert "no step and no batch in 25 s. Rank 0 is after 2 steps in stock_by_hand.py:" in said
    assert "Rank 1 is after 2 steps in stock_by_hand.py:" in said
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().attrib["errors"] == "1"
    assert shardwise.wait_until_gone() == []


@pytest.mark.full
def test_interrupt_leaves_nothing_behind(shardwise: Launcher, tmp_path: Path) -> None:
    started = shardwise.start("verify", "-n", "2", "--stock", BY_HAND, "hangs")
    wait_for_step(tmp_path)
    started.send_signal(signal.SIGINT)
    assert shardwise.finish(started).code != 0
    assert shardwise.wait_until_gone() == []
    assert shardwise.folders_left() == []


def wait_for_step(folder: Path) -> None:
    """Wait until rank 1 has made its second step."""
    until = time.monotonic() + 60
    while not list(folder.glob("temporary/shardwise-stock-*/run-1/rank-1/*-step-2.pt")):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("none", None),
        ("optimizer", "optimizer state"),
        ("scheduler", "learning rate"),
        ("samples", "samples"),
        ("random", "random state"),
        ("never", "does not resume"),
    ],
)
def test_resumes(shardwise: Launcher, tmp_path: Path, mistake: str, cause: str | None) -> None:
    words = ("-n", "2", "--stock", "--resume-at", "5", "--steps", "9")
    ran, found = verify(shardwise, tmp_path, *words, script("stock_resumes"), mistake)
    assert ran.code == (5 if cause else 0), ran.out + ran.err
    causes = found["causes"]
    assert isinstance(causes, list)
    assert [each["name"] for each in causes][:1] == ([cause] if cause else [])
    assert found["resumed_from"] == (0 if mistake == "never" else 4)
    assert list(tmp_path.glob("last-*.pt")) == []


@pytest.mark.full
def test_takes_a_whole_command(shardwise: Launcher, tmp_path: Path) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    command = f"{torchrun} --standalone --nproc-per-node 2 {SCRIPT} twice"
    ran, found = verify(shardwise, tmp_path, "--stock", command)
    assert ran.code == 5, ran.out + ran.err
    assert found["ranks"] == 2


@pytest.mark.full
@pytest.mark.parametrize(("mistake", "cause"), [("none", []), ("mean_of_means", ["mean of means"])])
def test_takes_a_command_of_deepspeeds_launcher(
    shardwise: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    cause: list[str],
) -> None:
    pytest.importorskip("deepspeed", reason="the deepspeed package is not there")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launcher = Path(sys.executable).parent / "deepspeed"
    # The launcher passes --local_rank to the script. Its default port may be in use.
    port = stock_runs._free_port()
    command = f"{launcher} --num_gpus 2 --master_port {port} {script('stock_deepspeed')}"
    ran, found = verify(
        shardwise, tmp_path, "--stock", "--accept", "rounding", f"{command} 2 {mistake}"
    )
    assert ran.code == (5 if cause else 0), ran.out + ran.err
    causes = found["causes"]
    assert isinstance(causes, list)
    assert [each["name"] for each in causes] == cause
    assert found["ranks"] == 2
    assert found["rows"] == [48] * 3  # 3 micro-batches of 8 rows on each rank


def test_workflow_of_the_page_runs_its_command() -> None:
    page = (ROOT / "docs" / "verify_stock.md").read_text()
    (block,) = re.findall(r"```text\n(# \.github.*?)```", page, re.DOTALL)
    steps = yaml.safe_load(block)["jobs"]["verify"]["steps"]
    (install, check) = [each["run"] for each in steps if "run" in each]
    (extra,) = re.findall(r"shardwise\[(\w+)\]", install)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    # The other tests run such a command.
    assert f"```sh\n{check}\n```" in page
    written = steps[-1]["with"]["path"].split()
    assert re.findall(r"--junit (\S+)", check) == written[:1]
    assert written[1:] == ["runs/verify-train"]


@WARM
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stock", "--zero", "3", SCRIPT), "--zero has no meaning"),
        (("--stock", "-n", "2", "torchrun x.py"), "Give -n for a script, or a whole command"),
        (("--junit", "a.xml", SCRIPT), "--junit needs --stock"),
        (("--resume-at", "3", SCRIPT), "--resume-at needs --stock"),
        (("--time-limit", "9", SCRIPT), "--time-limit needs --stock"),
        (("--stock", "--also", "-n 4", SCRIPT), "--also has no meaning with --stock"),
        (("--stock", "--resume-at", "20", SCRIPT), "leaves no step to compare"),
        (("--stock", "--resume-with", "x.py", SCRIPT), "--resume-with needs --resume-at"),
        (("--stock", "--time-limit", "0", SCRIPT), "--time-limit"),
        (("--stock", "--junit", "nowhere/a.xml", SCRIPT), "there is no folder nowhere"),
        (("--stock", "nothing-here --now"), "There is no program 'nothing-here'"),
    ],
)
def test_refuses_before_a_run(shardwise: Launcher, words: tuple[str, ...], message: str) -> None:
    ran = shardwise.run("verify", *words)
    assert ran.code in (1, 2)
    assert message in " ".join((ran.out + ran.err).split())


@WARM
def test_command_without_ranks_is_an_error(shardwise: Launcher, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import torch\n")
    ran = shardwise.run("verify", "--stock", f"{sys.executable} alone.py")
    assert ran.code in (1, 2)
    assert "started no process that has a rank" in " ".join((ran.out + ran.err).split())


@WARM
def test_script_without_a_step_is_an_error(shardwise: Launcher, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\n")
    ran = shardwise.run("verify", "-n", "2", "--stock", "idle.py")
    assert ran.code in (1, 2)
    assert "made no step of a torch optimizer" in " ".join((ran.out + ran.err).split())
