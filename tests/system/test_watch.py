"""Reports about a rank that does not arrive: the message, and where the other ranks are."""

import re
import signal
import subprocess
import sys
import time

import pytest

from tests.system.launcher import Launcher, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of processes are Linux's")

WARM = pytest.mark.usefixtures("warm_programs")
IN_STEP = r"in engine\.\w+ \(.*watched\.py:3[45]\)"
"""Location of the ranks that continue to train."""


@WARM
def test_a_rank_that_is_stopped(shardwise: Launcher) -> None:
    short = ("--timeout", "8", "--warn-after", "2", "--grace", "0.5")
    ran = shardwise.run("run", "-n", "3", *short, script("watched"), "stop")
    assert ran.code == 1
    assert re.search(
        r"\[0\] shardwise: ranks 0, 2 have waited \d+ s in step 3 for rank 1\. "
        r"The run ends after 8 s \(--timeout\)\.\n"
        rf"\[0\]   ranks 0, 2 are {IN_STEP}: [\w -]+ \(call \d+\), for rank 1\n"
        r"\[0\]   rank 1 is stopped \(T\)\n"
        r"\[0\]   stack of ranks? 0",
        ran.err,
    ), ran.err
    assert "shardwise: rank 1 of 3 did not arrive, and reported nothing until" in ran.err
    assert "for rank 1, which did not join. Rank 1 is stopped (T)." in ran.err.splitlines()[-1]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_is_stopped_before_it_joins(shardwise: Launcher, rank: int) -> None:
    short = ("--timeout", "5", "--grace", "0.5")
    began = time.monotonic()
    ran = shardwise.run("run", "-n", "2", *short, script("stops_early"), str(rank))
    assert time.monotonic() - began < 60  # and not forever, nor until a different timeout
    assert ran.code == 1
    assert f"shardwise: rank {rank} of 2 did not arrive, and reported nothing" in ran.err
    said = "did not reach rank 0 at 127.0.0.1" if rank == 0 else "Rank 1 of the 2 that shardwise"
    assert said in ran.err.splitlines()[-1], ran.err
    assert "within 5 s (--timeout)" in ran.err.splitlines()[-1], ran.err


@WARM
def test_a_rank_in_an_endless_loop(shardwise: Launcher) -> None:
    words = ("run", "-n", "3", "--warn-after", "2", script("watched"), "loop")
    process = shardwise.start(*words)
    said = until(process, " in strike: ")
    process.send_signal(signal.SIGINT)
    assert re.search(r"\[0\]   rank 1 is in no collective, at .*watched\.py:(19|20)\n", said), said
    ran = shardwise.finish(process)
    assert ran.code == 130


def until(process: "subprocess.Popen[str]", words: str) -> str:
    """Return the output of a run up to the line that contains `words`."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it ended without {words!r}:\n{said}")


@WARM
@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.full)])
def test_a_save_on_rank_0_alone(shardwise: Launcher, transport: str) -> None:
    words = ("run", "-n", "3", "--transport", transport, script("watched"), "save")
    ran = shardwise.run(*words)
    assert ran.code == 1
    assert re.search(
        r"Rank 0 is in engine\.save \(.*watched\.py:15\), "
        # One of the two may be one call ahead of the other.
        rf"(ranks 1, 2 are {IN_STEP}|rank 1 is {IN_STEP}, rank 2 is {IN_STEP}): "
        r"is the call under `if is_main`\?",
        ran.err,
    ), ran.err
    assert not re.search(r" waited (\d|too)", ran.err)  # it was said before any wait was long


@WARM
def test_a_rank_in_another_collective_over_gloo(shardwise: Launcher) -> None:
    ran = shardwise.run("run", "-n", "3", "--transport", "gloo", script("watched"), "differ")
    assert ran.code == 1
    call = r"\w[\w-]+ of \d+ \w+ values"
    assert re.search(rf"Call \d+ is {call} on rank \d and {call} on rank \d, of 3\.", ran.err), (
        ran.err
    )
    assert "of 7 float32 values on rank 1" in ran.err
    assert "rank 1 is in world.sum (" in ran.err
    assert not re.search(r" waited (\d|too)", ran.err)  # it was said before any wait was long


@WARM
def test_a_signal_shows_the_stacks_of_a_rank(shardwise: Launcher) -> None:
    ran = shardwise.run("run", "-n", "2", script("watched"), "show")
    assert ran.code == 0
    assert re.search(r'\[1\]   File ".*watched\.py", line 26 in strike\n', ran.err), ran.err
