"""The exact mode as a user types it."""

import sys

import pytest

from tests.system.launcher import Launcher, script

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.usefixtures("warm_programs"),
]


def said(shardwise: Launcher, workers: int, *flags: str, **environ: str) -> str:
    """Return the output of rank 0, without its prefix."""
    ran = shardwise.run("run", "-n", str(workers), *flags, script("exact"), env=environ)
    assert ran.code == 0, ran.err
    (line,) = (line for line in ran.out.splitlines() if "threads" in line)
    return line[line.index("threads") :]


def test_the_same_bits_whatever_threads_a_worker_would_have(shardwise: Launcher) -> None:
    alone = said(shardwise, 1, "--exact", "4", OMP_NUM_THREADS="2")
    assert alone.startswith("threads 1, ")
    assert said(shardwise, 2, "--zero", "3", "--transport", "gloo", "--exact", "4") == alone


def test_workers_that_cannot_give_the_same_bits_are_refused(shardwise: Launcher) -> None:
    ran = shardwise.run("run", "-n", "3", "--exact", "6", script("exact"))
    assert ran.code != 0
    assert "--exact 6 gives the same bits on 1, 2 and 6 workers" in ran.err
