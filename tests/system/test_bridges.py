"""Scripts for Accelerate and Trainer that name nothing of ours, and how they are started."""

import re
import sys

import pytest

from tests.system.launcher import Launcher, Ran, script
from tests.system.test_launchers import TORCHRUN, mpirun, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_library_programs"),
]
pytest.importorskip("accelerate", reason="the accelerate package is not there")

ADOPTED = script("accelerated")
WORDS = [sys.executable, "-m", "shardwise", "run"]


def losses(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return re.findall(r"loss (\S+)", ran.out)


def stock(shardwise: Launcher) -> list[str]:
    return losses(run(shardwise, "env", "ACCELERATE_USE_CPU=true", sys.executable, ADOPTED))


def test_accelerates_scripts_run_unchanged(shardwise: Launcher) -> None:
    expected = stock(shardwise)
    assert len(expected) == 3
    ran = run(shardwise, *WORDS, "-n", "2", "--zero", "3", "--adopt", "accelerate", ADOPTED)
    assert losses(ran) == expected
    assert "by shardwise.accelerate.accelerator 2" in ran.out
    assert "from __main__ True" in ran.out


@pytest.mark.parametrize("launcher", ["openmpi", pytest.param("torchrun", marks=pytest.mark.full)])
def test_other_launchers_start_them(shardwise: Launcher, launcher: str) -> None:
    adopt = ["-m", "shardwise.adopt", "accelerate", ADOPTED]
    first = [TORCHRUN, "--standalone", "--nproc-per-node=2"]
    if launcher == "openmpi":
        first = [mpirun("openmpi"), "-n", "2", sys.executable]
    ran = run(shardwise, "env", "SHARDWISE_ZERO=2", *first, *adopt)
    assert losses(ran) == stock(shardwise)
    assert "by shardwise.accelerate.accelerator 2" in ran.out


@pytest.mark.parametrize("zero", ["3", pytest.param("1", marks=pytest.mark.full)])
def test_trainers_scripts_run_unchanged(shardwise: Launcher, zero: str) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not there")
    adopt = ["--zero", zero, "--adopt", "transformers", script("hugging_trainer"), "out"]
    two = run(shardwise, *WORDS, "-n", "2", *adopt)
    assert two.code == 0, two.err
    assert "ranks 2 ['Trainer', 'Sharded']" in two.out
    assert "saved 7488" in two.out
    one = run(shardwise, *WORDS, "-n", "1", *adopt[:-1], "alone")
    assert "ranks 1 " in one.out


def test_what_cannot_be_adopted(shardwise: Launcher) -> None:
    for words, said in (
        (
            ["--adopt", "keras", ADOPTED],
            "--adopt takes names out of accelerate, deepspeed",
        ),
        (["--adopt", "accelerate", "absent.py"], "There is no script absent.py"),
        (["--adopt", "accelerate", "sh"], "--adopt runs scripts of Python, and sh is none."),
    ):
        ran = run(shardwise, *WORDS, "-n", "2", *words)
        assert (ran.code, said in ran.err) == (2, True), ran.err
