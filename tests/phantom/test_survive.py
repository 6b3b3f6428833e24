"""With `--survive`, ranks on the simulated device continue over new communicators of NCCL."""

import re
import time
from types import SimpleNamespace

import pytest

from shardwise.comm import abortable_nccl
from shardwise.comm.abortable_nccl import Communicators
from tests.phantom.script import ROOT
from tests.random_losses.drawing import GATHERS, MOMENTS, PUBLISHES
from tests.random_losses.reference import STEPS, check
from tests.system.launcher import Launcher

ENVIRON = {"OMP_NUM_THREADS": "1"}
SCRIPT = str(ROOT / "tests" / "phantom" / "survives.py")

CASES = [
    pytest.param(3, "plain", "adamw", "0:gather:6", marks=pytest.mark.full),
    # The aborted all-gather spoils the only copy of the lost rank's parameters.
    (1, "plain", "adamw", "0:publish:4"),
    pytest.param(2, "steps", "sgd", "1:backward:4", marks=pytest.mark.full),
    *(
        pytest.param(zero, loop, "adamw", f"{number % 3}:{moment}:4", marks=pytest.mark.full)
        for number, (moment, zero, loop) in enumerate(
            [
                *((moment, number % 3, "steps") for number, moment in enumerate(MOMENTS)),
                *((moment, 1 + number % 2, "plain") for number, moment in enumerate(PUBLISHES)),
                *((moment, 3, "steps") for moment in (*MOMENTS, *GATHERS)),
                *((moment, zero, "plain") for moment in ("begun", "written") for zero in (0, 3)),
            ]
        )
    ),
]


@pytest.fixture
def launcher(phantom, tmp_path):
    """Return a launcher. A simulated device is possible."""
    made = Launcher(tmp_path)
    yield made
    left = made.wait_until_gone()
    made.close()
    assert left == []


@pytest.mark.parametrize(("zero", "loop", "kind", "kill"), CASES)
def test_a_killed_rank_costs_at_most_its_step(launcher, zero, loop, kind, kill):
    flags = ["-n", "3", "--survive", "1", "--zero", str(zero), "--device", "cuda"]
    words = [SCRIPT, loop, kind, "out", kill]
    ran = launcher.run("run", *flags, "--timeout", "60", *words, env=ENVIRON)
    assert ran.code == 0, ran.err
    assert "(cuda), over nccl" in ran.out
    assert ran.out.count("not in order: []") == 2, ran.out
    left = [rank for rank in range(3) if rank != int(kill[0])]
    for place, rank in enumerate(left):
        assert f"rank {rank} is {place} of 2 after step {STEPS}" in ran.out
    (seconds,) = re.findall(r"2 workers continue after (\d+\.\d+) s", ran.out)
    assert float(seconds) < 30
    check(launcher.folder, kind, left)


@pytest.mark.full
def test_two_of_three_ranks_are_lost(launcher):
    flags = ["-n", "3", "--survive", "1", "--zero", "1", "--device", "cuda", "--timeout", "60"]
    words = [SCRIPT, "steps", "adamw", "out", "0:reduce:3", "2:backward:8"]
    ran = launcher.run("run", *flags, *words, env=ENVIRON)
    assert ran.code == 0, ran.err
    assert "1 worker continues after" in ran.out
    check(launcher.folder, "adamw", [1])


class Group:
    """A process group whose communicator records that it is aborted."""

    def __init__(self, calls):
        self.calls = calls

    def _get_backend(self, device):
        assert device.type == "cuda"
        return SimpleNamespace(
            abort=lambda: self.calls.append("abort"),
            _group_start=lambda: self.calls.append("start"),
            _group_end=lambda: self.calls.append("end"),
        )


@pytest.mark.parametrize("abort", [None, SimpleNamespace(rank=0), SimpleNamespace(rank=1)])
def test_communicators_are_aborted_together_after_a_loss(monkeypatch, abort):
    """This rank is rank 0. Its own error aborts nothing, because it then closes its groups."""
    monkeypatch.setattr(abortable_nccl, "TICK", 0.01)
    calls, ended = [], set()
    server = SimpleNamespace(rank=0, abort=abort, has_ended=lambda rank: rank in ended)
    communicators = Communicators(server, [0, 1, 2])
    for _ in range(2):
        communicators.add(Group(calls))
    time.sleep(0.2)
    if abort is None or abort.rank == 0:
        assert calls == []
        ended.add(2)
    assert communicators.wait_for_abort()
    communicators.abort()  # waits for the thread, and aborts nothing again
    assert calls == ["start", "abort", "abort", "end"]
    assert communicators.lost() == sorted(ended)
    communicators.close()
