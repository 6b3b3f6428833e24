"""A few random faults: the report names the rank at fault, and nothing is left behind.

To try more: `python -m tests.random_faults --faults 200 --seed 1`. For the output of one that fails
here: `--fault SEED`.
"""

import sys

import pytest

from tests.random_faults.drawing import OWN, PLACES, SIGNALS, Fault, draw
from tests.random_faults.judging import COMMAND, Runner, judge
from tests.system.launcher import Ran

FAULTS = (23, pytest.param(11, marks=pytest.mark.full))
"""A rank that is killed and one that is stopped, both around a save."""
FAULT = Fault(
    size=3, victim=1, kind="kill", place="forward", step=1, zero=0, transport="auto", delay=0.0
)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize("seed", FAULTS)
def test_names_rank_at_fault(tmp_path, seed):
    assert not (told := COMMAND.failures(Runner(tmp_path), [seed])), told


def test_seed_determines_fault():
    several = [draw(seed) for seed in range(300)]
    assert several == [draw(seed) for seed in range(300)]
    assert {each.kind for each in several} == {*SIGNALS, *OWN}
    assert {each.place for each in several} == {*PLACES}


NAMED = "\nshardwise: rank 1 of 3 was ended by SIGKILL.\n"


@pytest.mark.parametrize(
    ("code", "err", "seconds", "left", "kind"),
    [
        (137, NAMED, 1.0, [], "named"),
        (137, NAMED.replace("rank 1", "rank 2"), 1.0, [], "wrong rank"),
        (1, "shardwise: it failed.\n", 1.0, [], "nobody named"),
        (0, NAMED, 1.0, [], "taken for success"),
        (137, NAMED, 90.0, [], "slow"),
        (137, NAMED, 1.0, ["4711"], "left behind"),
    ],
)
def test_detects_wrong_reports(code, err, seconds, left, kind):
    assert judge(FAULT, Ran(code, "", err), seconds, left)[0] == kind
