"""With `--survive`, ranks on GPUs continue over new communicators of NCCL."""

import sys

import pytest
import torch

from tests.gpu.training import needs_gpu
from tests.random_losses.reference import STEPS, check
from tests.system.launcher import Launcher, script

RANKS = 3

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(sys.platform != "linux", reason="--survive needs Linux"),
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS, reason=f"NCCL needs a GPU for each of {RANKS} ranks"
    ),
]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("moment", ["forward", "backward", "reduce", "update", "written"])
def test_a_killed_rank_costs_at_most_its_step(tmp_path, zero, moment):
    launcher, at = Launcher(tmp_path), 8 if moment == "written" else 4
    flags = ["-n", str(RANKS), "--survive", "1", "--zero", str(zero), "--device", "cuda"]
    words = [script("survives"), "steps", "adamw", "out", f"1:{moment}:{at}"]
    try:
        ran = launcher.run("run", *flags, "--timeout", "60", *words)
        assert ran.code == 0, ran.err
        assert "2 workers continue after" in ran.out
        for place, rank in enumerate((0, 2)):
            assert f"rank {rank} is {place} of 2 after step {STEPS}" in ran.out
        check(tmp_path, "adamw", [0, 2])
        assert launcher.wait_until_gone() == []
    finally:
        launcher.close()
