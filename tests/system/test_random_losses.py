"""A few random losses of ranks in runs with `--survive`: the end equals that of one process.

To try more: `python -m tests.random_losses --losses 200 --seed 1`. For the output of one that fails
here: `--loss SEED`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.random_losses.drawing import (
    ENTERS,
    GATHERS,
    JOINS,
    MOMENTS,
    PUBLISHES,
    SAVES,
    draw,
)
from tests.random_losses.judging import COMMAND, Runner, judge, lost_ranks
from tests.random_losses.reference import STEPS, order, undisturbed
from tests.system.launcher import Ran


@pytest.mark.skipif(sys.platform != "linux", reason="--survive needs Linux")
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize("seed", [1002, *(pytest.param(s, marks=pytest.mark.full) for s in (7, 8))])
def test_the_end_equals_that_of_one_process(tmp_path: Path, seed: int) -> None:
    assert not (told := COMMAND.failures(Runner(tmp_path, {}), [seed])), told


def test_a_seed_determines_its_losses() -> None:
    several = [draw(seed) for seed in range(300)]
    assert several == [draw(seed) for seed in range(300)]
    drawn = [loss for run in several for loss in run.losses]
    moments = {*MOMENTS, *PUBLISHES, *GATHERS, *SAVES, *JOINS, *ENTERS}
    assert {loss.moment for loss in drawn} == moments
    assert {loss.name for loss in drawn} == {"KILL", "STOP", "TERM"}
    assert {run.zero for run in several} == {0, 1, 2, 3}
    assert {run.spares for run in several} == {0, 1, 2}


RUN = next(run for run in map(draw, range(100)) if run.size == 2 and run.most == 1)
LOST = RUN.losses[0].rank
ENDED = f"shardwise: rank {LOST} ended (SIGKILL). The others continue without it (--survive).\n"
CONTINUED = f"shardwise: lost rank {LOST} in step 3\n"
FINISHED = f"rank {1 - LOST} is 0 of 1 after step {STEPS}\n"


@pytest.mark.parametrize(
    ("code", "out", "err", "change", "kind"),
    [
        (0, CONTINUED + FINISHED, ENDED, 0.0, "exact"),
        (0, FINISHED, ENDED, 0.0, "exact, lost too late"),
        (0, CONTINUED + FINISHED, ENDED, 1e-6, "other result"),
        (0, CONTINUED, ENDED, 0.0, "ended"),
        (137, CONTINUED, ENDED, 0.0, "ended"),
    ],
)
def test_a_run_is_judged_by_its_end(
    tmp_path: Path, code: int, out: str, err: str, change: float, kind: str
) -> None:
    losses, weights = undisturbed(RUN.kind, order())
    stored = {"losses": losses, "weights": weights + change, "own": []}
    torch.save(stored, tmp_path / f"out-{1 - LOST}.pt")
    assert judge(RUN, Ran(code, out, err), tmp_path, lost=lost_ranks(err), is_pair=True)[0] == kind
