"""Horovod scripts under each launcher, and the warnings about steps that they leave out."""

import re
import sys

import pytest

from tests.system.launcher import Launcher, script
from tests.system.test_launchers import EXAMPLES, TORCHRUN, mpirun, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_programs"),
]


def started_by(launcher: str, *flags: str) -> list[str]:
    """Return the command with which a launcher starts two ranks of a script."""
    if launcher == "shardwise":
        return [sys.executable, "-m", "shardwise", "run", "-n", "2", *flags]
    if launcher == "torchrun":
        return [TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    return [mpirun(launcher), "-n", "2", sys.executable]


@pytest.mark.parametrize(
    "launcher",
    [
        "shardwise",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("openmpi", "mpich", "torchrun")),
    ],
)
def test_the_mnist_example(shardwise: Launcher, launcher: str) -> None:
    words = started_by(launcher)
    ran = run(shardwise, *words, str(EXAMPLES / "horovod_mnist.py"), "--checkpoint", "model.pt")
    assert ran.code == 0, ran.err
    found = re.findall(r"epoch \d  train \S+  test \S+  (\S+)%", ran.out)
    assert len(found) == 6
    assert float(found[-1]) > 80
    assert (shardwise.folder / "model.pt").exists()
    assert "shardwise:" not in ran.err  # no step is left out


@pytest.mark.parametrize(
    "launcher", ["shardwise", pytest.param("torchrun", marks=pytest.mark.full)]
)
def test_the_elastic_example_loses_a_rank(shardwise: Launcher, launcher: str) -> None:
    words = started_by(launcher, "--restarts", "2")
    ran = run(shardwise, *words, str(EXAMPLES / "horovod_elastic.py"), "--fail", "35")
    assert ran.code == 0, ran.err
    assert "2 ranks, epoch 0, step 0\n" in ran.out
    assert "2 ranks, epoch 0, step 30\n" in ran.out
    assert "after 180 steps: y = 3.00 x -1.00\n" in ran.out
    assert list((shardwise.folder / "temporary").glob("shardwise-commit*")) == []
    if launcher == "shardwise":
        assert "from the checkpoint of step 30: 5 steps are lost." in ran.err


@pytest.mark.full
def test_the_elastic_example_under_mpirun(shardwise: Launcher) -> None:
    """Which starts nothing again."""
    ran = run(shardwise, *started_by("openmpi"), str(EXAMPLES / "horovod_elastic.py"))
    assert ran.code == 0, ran.err
    assert "after 180 steps: y = 3.00 x -1.00\n" in ran.out


BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
SHARD = "sampler = torch.utils.data.distributed.DistributedSampler(dataset"
SCALE = "lr=args.lr * hvd.size()"
SAVE = "ranks 0, 1 all write "
WRAP = "hvd.DistributedOptimizer(optimizer, named_parameters="


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("", []),
        ("broadcast shard scale save", [BROADCAST, SHARD, SCALE, SAVE]),
        ("wrap", [WRAP]),
    ],
)
def test_steps_that_are_left_out_are_told_of_once(
    shardwise: Launcher, left_out: str, said: list[str]
) -> None:
    words = started_by("shardwise")
    ran = run(shardwise, *words, script("horovod_careless"), *left_out.split())
    assert ran.code == 0, ran.err
    lines = [line for line in ran.err.splitlines() if "shardwise: " in line]
    assert len(lines) == len(said), ran.err
    assert all(any(words in line for line in lines) for words in said), ran.err


@pytest.mark.full
def test_a_rank_that_does_not_ask_is_told_of(shardwise: Launcher) -> None:
    program = (
        "import time, torch, shardwise.horovod as hvd; hvd.init()\n"
        "if hvd.rank() == 1: time.sleep(3)\n"
        "hvd.allreduce(torch.ones(1), name='late')\n"
        "if hvd.rank() == 1: time.sleep(9)\n"
        "hvd.allreduce(torch.ones(1), name='too late')\n"
    )
    words = started_by("shardwise", "--warn-after", "1", "--timeout", "5", "--grace", "1")
    (shardwise.folder / "tests_late.py").write_text(program)
    ran = run(shardwise, *words, "tests_late.py")
    assert ran.code != 0
    warning = "allreduce 'late' has waited 1 s for rank 1. It will fail after 5 s (--timeout)."
    assert warning in ran.err
    assert "tests_late.py:2" in ran.err
    assert "allreduce 'too late' waited 5 s for rank 1." in ran.err
